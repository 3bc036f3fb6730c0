"""Hooks and steps that do legal but unusual things with weights, gradients and ranks: right, or refused by name on every rank."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.contract.items import Item, compare_item
from tests.contract.layouts import LAYOUTS, ContractLayout
from tests.contract.models import LossRecorder, Model, Module, loader, make_trainer, row_losses
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


class Marks(Module):
    """Marks parameters for `configure_optimizers`, and halves gradients as they are made."""

    def __init__(self) -> None:
        super().__init__()
        for name, each in self.named_parameters():
            each.is_bias = name.endswith("bias")
            each.register_hook(lambda gradient: gradient / 2)

    def configure_optimizers(self) -> Any:
        groups = [{"params": [each for each in self.parameters() if each.is_bias is kind]} for kind in (True, False)]
        return torch.optim.SGD([{**groups[0], "lr": 0.1}, groups[1]], lr=0.5, momentum=0.9)


class Keeps(Module):
    """Keeps values for the end of an epoch, as Lightning has it since version 2."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[Tensor] = []
        self.rows = {"validated": 0}
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
        self.rows["validated"] += len(batch["ids"])

    def on_validation_epoch_end(self) -> None:
        kept = torch.cat(self.outputs)
        self.log("val", kept.mean(), batch_size=len(kept))
        self.outputs.clear()
        self.log("validated", float(self.rows["validated"]), reduce_fx="sum", sync_dist=True)
        self.rows["validated"] = 0


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
    return _train([ClipsItself, ChangesWeights, Recomputes, StepsByHand], layout, folder)


@pytest.mark.parametrize("layout", ["dp2", "dp2_zero1", "dp2_zero3", "tp2", "cp2", "pp2_1f1b"])
def test_hooks_may_clip_and_change_weights(layout: str) -> None:
    result, why = compare_item(Item("own_hooks", 3, _right, relative=4e-6), LAYOUTS[layout])
    assert result == "same", "\n".join(why[:10])


def _kept(layout: ContractLayout, folder: str) -> Any:
    return _train([TakesApart, Marks, Keeps], layout, folder)


@pytest.mark.parametrize("layout", ["dp2_zero3", "pp2_1f1b"])
def test_steps_may_take_their_batch_apart_and_keep_what_they_like(layout: str) -> None:
    result, why = compare_item(Item("kept", 3, _kept, relative=4e-6), LAYOUTS[layout])
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
