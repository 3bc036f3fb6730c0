"""Hooks and steps that do legal but unusual things with weights, gradients and ranks: right, or refused by name on every rank."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.contract.items import Item, compare_item
from tests.contract.layouts import LAYOUTS, ContractLayout
from tests.contract.models import Block, LossRecorder, Model, Module, loader, make_trainer, row_losses
from tests.strategy.test_random_numbers import SEQUENCE

TP2_SP = ContractLayout("tp2_sp", 2, 1, SEQUENCE)


class ClipsItself(Module):
    """Clips by torch's function: all gradients, then those of one layer more tightly."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        total = nn.utils.get_total_norm([each.grad for each in self.parameters() if each.grad is not None])
        norm = nn.utils.clip_grad_norm_(self.parameters(), 0.2)
        least = nn.utils.clip_grad_norm_(self.model.head.parameters(), 0.05)
        largest = nn.utils.clip_grad_norm_(self.parameters(), 10.0, norm_type="inf")
        self.log_dict({"total": total, "norm": norm, "least": least, "largest": largest})


class ChangesWeights(Module):
    """Changes weights in place in every hook around steps, also where an evaluation has come in between."""

    def _times(self, factor: float) -> None:
        for each in self.parameters():
            each.data.mul_(factor)

    def on_train_start(self) -> None:
        self._times(1.1)

    def on_train_epoch_start(self) -> None:
        self._times(0.9)

    def on_train_batch_end(self, *_: Any) -> None:
        for each in self.parameters():
            each.data.clamp_(-0.3, 0.3)

    def on_validation_start(self) -> None:
        self._times(0.95)

    def on_validation_end(self) -> None:
        self._times(1.02)

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        self._times(0.99)

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val", self.loss(batch))


class Recomputes(Module):
    """Its model recomputes layers by itself, the old way."""

    def __init__(self) -> None:
        super().__init__()
        self.model.__class__ = RecomputingModel


class RecomputingModel(Model):
    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=True)
        return self.head(self.norm(x))


class StepsByHand(Module):
    """Updates weights without its optimizer."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer_closure()
        for each in self.parameters():
            each.data.sub_(each.grad, alpha=0.3)


class TakesApart(Module):
    """Takes entries out of its batch and writes into it."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        labels = batch.pop("labels")
        labels[:, :2] = -100
        return row_losses(self.model(batch.pop("ids").add_(1).remainder_(16)), labels).mean()


class Keeps(Module):
    """Keeps values for the end of an epoch, as Lightning has it since version 2."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[Tensor] = []
        self.by_kind: dict[str, list[Any]] = {}

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.by_kind.setdefault("rows", []).append({"row": batch["row"]})
        losses = row_losses(self.model(batch["ids"]), batch["labels"])
        self.least = losses.detach().min()
        return losses.mean()

    def on_train_batch_end(self, *_: Any) -> None:
        self.log("least", self.least, reduce_fx="min", sync_dist=True, on_epoch=True, on_step=False)

    def on_train_epoch_end(self) -> None:
        kept = torch.cat([each["row"] for each in self.by_kind.pop("rows")])
        self.log("rows", kept.float().mean(), batch_size=len(kept))

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.outputs.append(row_losses(self.model(batch["ids"]), batch["labels"]))

    def on_validation_epoch_end(self) -> None:
        kept = torch.cat(self.outputs)
        self.log("val", kept.mean(), batch_size=len(kept))
        self.outputs.clear()


def _train(kinds: list[type[Module]], layout: ContractLayout, folder: str) -> Any:
    found = {}
    for kind in kinds:
        losses = LossRecorder()
        trainer = make_trainer(layout, max_epochs=2, val_check_interval=2, callbacks=[losses])
        evaluated = [loader(layout, 9, seed=2)] if "validation_step" in vars(kind) else []
        trainer.fit(kind(), loader(layout, 32), *evaluated)
        found[kind.__name__] = (losses.losses, {name: float(value) for name, value in trainer.callback_metrics.items()})
    return found


def _right(layout: ContractLayout, folder: str) -> Any:
    return _train([ClipsItself, ChangesWeights, Recomputes, StepsByHand, TakesApart, Keeps], layout, folder)


@pytest.mark.parametrize("layout", ["dp2", "dp2_zero1", "dp2_zero3", "tp2", "cp2", "pp2_1f1b"])
def test_hooks_may_clip_and_change_weights(layout: str) -> None:
    result, why = compare_item(Item("own_hooks", 3, _right, relative=4e-6), LAYOUTS[layout])
    assert result == "same", "\n".join(why[:10])


class Penalised(Module):
    """A penalty on the gradient at the embedding, which is differentiated in its turn."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        hidden = start = self.model.embed(batch["ids"])
        for layer in self.model.layers:
            hidden = layer(hidden)
        loss = row_losses(self.model.head(self.model.norm(hidden)), batch["labels"]).mean()
        (gradient,) = torch.autograd.grad(loss, start, create_graph=True)
        return loss + 50 * gradient.square().sum() * len(batch["ids"])  # a sum over rows, of the gradient of a mean


def _penalised(layout: ContractLayout, folder: str) -> Any:
    return _train([Penalised], layout, folder)


@pytest.mark.parametrize("layout", ["dp2_zero1", "tp2"])
def test_a_penalty_on_gradients_is_right(layout: str) -> None:
    result, why = compare_item(Item("penalised", 3, _penalised, relative=4e-6), LAYOUTS[layout])
    assert result == "same", "\n".join(why[:10])


class Teacher(Module):
    """A copy of the model, made before the first step, follows it and is used in the step."""

    def on_train_start(self) -> None:
        object.__setattr__(self, "teacher", copy.deepcopy(self.model).requires_grad_(False))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        logits = self.model(batch["ids"])
        with torch.no_grad():
            wanted = self.teacher(batch["ids"])
        return row_losses(logits, batch["labels"]).mean() + (logits - wanted).square().mean()

    def on_train_batch_end(self, *_: Any) -> None:
        for each, other in zip(self.teacher.parameters(), self.model.parameters(), strict=True):
            each.data.lerp_(other.data, 0.1)


def _teacher(layout: ContractLayout, folder: str) -> Any:
    return _train([Teacher], layout, folder)


@pytest.mark.parametrize(
    "layout",
    [
        LAYOUTS["tp2"],
        LAYOUTS["cp2"],
        ContractLayout("recomputed", 2, 2, {"activation_checkpoint": "full", "num_microbatches": 2}),
    ],
    ids=lambda each: each.name,
)
def test_a_copy_of_the_model_has_weights_of_its_own(layout: ContractLayout) -> None:
    result, why = compare_item(Item("teacher", 3, _teacher, relative=4e-6), layout)
    assert result == "same", "\n".join(why[:10])


class Gathers(Module):
    """Gathers from other ranks within the step, as losses over all samples do."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        losses = row_losses(self.model(batch["ids"]), batch["labels"])
        self.log("gathered", self.all_gather(losses.detach()).mean())
        return losses.mean()

    def on_train_epoch_end(self) -> None:
        self.log("ranks", self.all_gather(torch.ones(1)).mean() * 3)


def _gathers(layout: ContractLayout, folder: str) -> Any:
    return _train([Gathers], layout, folder)


@pytest.mark.parametrize("layout", ["tp2", "pp2_1f1b", "dp2_pp2"])
def test_all_gather_is_over_ranks_that_read_other_samples(layout: str) -> None:
    result, why = compare_item(Item("gathers", 3, _gathers, relative=4e-6), LAYOUTS[layout])
    assert result == "same", "\n".join(why[:10])


class Restarts(Module):
    """Gives a layer new values, other ones on every rank."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            nn.init.normal_(self.model.norm.weight)


class NormInTheLoss(Module):
    """The norm's weight is a replica; under sequence parallelism its gradient is made in parts."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.loss(batch) + 0.1 * self.model.norm.weight.square().sum()


class ReadsWeights(NormInTheLoss):
    """Reads weights of all ranks without gradients."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        with torch.no_grad():
            self.log("norm", self.model.norm.weight.square().sum())
        return self.loss(batch)


class OwnLoss(Module):
    """Each rank weighs its loss in its own way."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.loss(batch) * (1 + self.global_rank)


class Balanced(Module):
    """Layers keep a value beside their output, as routers do; the loss adds them up."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.model.layers:
            layer.register_forward_hook(_keep_balance)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.loss(batch) + sum(getattr(layer, "balance", 0.0) for layer in self.model.layers)


def _keep_balance(layer: nn.Module, inputs: Any, output: Tensor) -> None:
    layer.balance = output.square().mean()


class AsksFor(Balanced):
    """The last stage has no layer of the kind that keeps a value."""

    def __init__(self) -> None:
        super().__init__()
        self.model.layers[0].__class__ = FirstBlock

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.loss(batch) + getattr(self.model.layers[0], "balance", 0.0)


class FirstBlock(Block):
    pass


class DeepLoss(Module):
    """A part of the loss is made of what an early layer returns, past all units."""

    def __init__(self) -> None:
        super().__init__()
        self.model.__class__ = DeepModel

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.log("loss", loss := self.loss(batch) + self.model.early.square().mean())
        return loss


class DeepModel(Model):
    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for index, layer in enumerate(self.layers):
            x = layer(x)
            self.early = x if index == 0 else self.early
        return self.head(self.norm(x))


class Dropped(Module):
    """Leaves a layer out, after which the pipeline is cut."""

    def __init__(self) -> None:
        super().__init__()
        self.model.__class__ = DroppingModel


class DroppingModel(Model):
    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in (self.layers[0], self.layers[3]):
            x = layer(x)
        return self.head(self.norm(x))


class LooksOn(Balanced):
    """They keep it for looking at; what the step itself keeps counts."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(1.2))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.factor = self.temperature.square()
        return self.loss(batch) * self.factor

    def on_train_end(self) -> None:
        for each in (self, *self.model.layers):
            vars(each).pop("factor", None), vars(each).pop("balance", None)


class SamplesAlone(Module):
    def on_train_batch_end(self, *_: Any) -> None:
        if self.trainer.is_global_zero:
            with torch.no_grad():
                self.model(torch.zeros(1, 12, dtype=torch.long))


class SamplesAtTheEnd(Module):
    def on_train_end(self) -> None:
        if self.trainer.is_global_zero:
            with torch.no_grad():
                self.model.layers[0](torch.zeros(1, 12, 8))


class ReadsOtherRanks(Module):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.loss(batch) + 0.01 * sum(each.square().sum() for each in self.model.parameters())


def _of(run: Any) -> tuple[Any, str]:
    """What is run, and its name: a function, or training of the module made of these classes."""
    return (run, run.__name__) if callable(run) else (partial(_train, run), "_".join(each.__name__ for each in run))


@pytest.mark.parametrize(
    ("run", "layout", "words"),
    [
        ([Restarts], LAYOUTS["dp2"], "module is 'model.norm.weight': ranks that hold the same weights"),
        ([NormInTheLoss], TP2_SP, "training_step is 'model.norm.weight'"),
        ([Balanced], LAYOUTS["pp2_1f1b"], "training_step is 'its loss': only its output gets to the next stage"),
        ([AsksFor], LAYOUTS["pp2_1f1b"], "training_step is 'its loss': only its output gets to the next stage"),
        ([Dropped], LAYOUTS["pp2_1f1b"], "the pipeline is cut after a unit that this step has left out"),
        ([Dropped], LAYOUTS["pp2_interleaved"], "the pipeline is cut after a unit that this step has left out"),
        ([DeepLoss], LAYOUTS["pp2_1f1b"], "is made of a value that an earlier unit has made"),
        (_teacher, LAYOUTS["dp2_zero3"], "module is 'a copy': a copy of a layer has this rank's rows"),
        ([SamplesAlone], LAYOUTS["tp2"], "module is 'called in a hook on rank 0 only'"),
        ([SamplesAlone], LAYOUTS["dp2_zero3"], "module is 'called in a hook on rank 0 only'"),
        ([SamplesAtTheEnd], LAYOUTS["tp2"], "module is 'called in a hook on rank 0 only'"),
        ([OwnLoss], LAYOUTS["tp2"], "ranks that share every layer must come to the same loss"),
        ([ReadsOtherRanks], LAYOUTS["pp2_1f1b"], "a step used a parameter of another pipeline rank"),
    ],
)
def test_what_would_be_wrong_is_refused_on_every_rank(run: Any, layout: ContractLayout, words: str) -> None:
    run, name = _of(run)
    result, why = compare_item(Item(f"refused_{name}", 3, run, refused={layout.name: words}), layout)
    assert result == "refused", "\n".join(why[:10])


@pytest.mark.parametrize(
    ("run", "layout"),
    [([NormInTheLoss, ReadsWeights], LAYOUTS["tp2"]), ([ReadsWeights], TP2_SP), ([LooksOn], LAYOUTS["pp2_1f1b"])],
)
def test_what_is_right_is_not_refused(run: Any, layout: ContractLayout) -> None:
    run, name = _of(run)
    result, why = compare_item(Item(f"right_{name}", 3, run, relative=4e-6), layout)
    assert result == "same", "\n".join(why[:10])
