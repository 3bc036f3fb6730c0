"""Steps and hooks that would be wrong in a layout are refused by name on every rank, and what is like them and right is not."""

from __future__ import annotations

import contextlib
import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric

from tests.contract.items import Item, compare_item
from tests.contract.layouts import LAYOUTS, ContractLayout
from tests.contract.models import Block, Model, Module, loader, make_trainer, row_losses
from tests.strategy.test_own_hooks import TP2_SP, _teacher, _train
from tests.support.ranks import run_ranks


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


class MarksLate(Module):
    def on_train_start(self) -> None:
        for each in self.parameters():
            each.register_hook(lambda gradient: gradient / 2)


class ByHand(Module):
    """Looks at gradients within its step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.manual_backward(self.loss(batch))
        for each in self.parameters():
            if each.grad is not None:
                each.data.sub_(each.grad, alpha=0.1)


class Saves(Module):
    """Writes its model, as Hugging Face's do, when training ends."""

    def __init__(self) -> None:
        super().__init__()
        self.model.__class__ = SavingModel

    def on_train_end(self) -> None:
        self.model.save_pretrained("nowhere")


class SavingModel(Model):
    def save_pretrained(self, folder: str) -> None:
        raise AssertionError("this rank holds a part of the model")


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


class CollectingModel(Model):
    """Returns what a part of every layer has made, as Hugging Face models do their attention weights."""

    def forward(self, ids: Tensor) -> Any:
        seen: list[Tensor] = []
        with contextlib.ExitStack() as hooks:
            for part in [each for name, each in self.named_modules() if name.endswith("mlp.up")]:
                hooks.callback(part.register_forward_hook(lambda _part, _inputs, output: seen.append(output)).remove)
            return {"logits": super().forward(ids), "seen": tuple(seen)}


class Collected(Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = CollectingModel()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return row_losses(self.model(batch["ids"])["logits"], batch["labels"]).mean()


class Opened(Module):
    """Its forward calls the parts of units, not the units."""

    def __init__(self) -> None:
        super().__init__()
        self.model = OpenedModel()


class OpenedModel(Model):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(layer) for layer in self.layers)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            for part in layer:
                x = part(x)
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


class LogsInLayers(Module):
    """Logs in layers, and of weights and gradients in two hooks: each name on the rank that holds the layer."""

    def __init__(self) -> None:
        super().__init__()
        for index, layer in enumerate(self.model.layers):
            layer.register_forward_hook(partial(self.note, index))

    def note(self, index: int, layer: nn.Module, inputs: Any, output: Tensor) -> None:
        self.log(f"size_{index}", output.detach().abs().mean(), on_epoch=True)

    def on_after_backward(self) -> None:
        self.log_dict({name: each.grad.abs().max() for name, each in self.model.layers.named_parameters()}, on_epoch=True)

    def on_train_batch_end(self, *_: Any) -> None:
        self.log_dict({f"w{name}": each.detach().mean() for name, each in self.model.layers.named_parameters()}, on_epoch=True)


class CountsInLayers(LogsInLayers):
    """Layers log an object that counts, each in its place."""

    def __init__(self) -> None:
        super().__init__()
        self.hits = nn.ModuleList(MeanMetric() for _ in self.model.layers)

    def note(self, index: int, layer: nn.Module, inputs: Any, output: Tensor) -> None:
        self.hits[index](output.detach().mean())
        self.log(f"hit_{index}", self.hits[index], on_step=False, on_epoch=True)


class SumsUp(Module):
    """A loss that is a sum over rows, and another term."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return row_losses(self.model(batch["ids"]), batch["labels"]).sum() + 0.1 * self.loss(batch)


class AskingModel(Model):
    """Asks its first layer for what it is, as torch's encoder of transformers does."""

    def forward(self, ids: Tensor) -> Tensor:
        norm = self.layers[0].norm
        return super().forward(ids).to(norm.weight.dtype) * norm.elementwise_affine


class LooksOn(Balanced):
    """They keep it for looking at; what the step itself keeps counts."""

    def __init__(self) -> None:
        super().__init__()
        self.model.__class__ = AskingModel
        self.temperature = nn.Parameter(torch.tensor(1.2))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.factor = self.temperature.square()
        return self.loss(batch) * self.factor

    def on_train_end(self) -> None:
        for each in (self, *self.model.layers):
            vars(each).pop("factor", None), vars(each).pop("balance", None)


class GathersRows(Module):
    """The last batch has another number of rows on each rank."""

    def on_train_batch_end(self, outputs: Any, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.all_gather(batch["row"])


def _gathers_rows(layout: ContractLayout, folder: str) -> None:
    make_trainer(layout, max_epochs=1).fit(GathersRows(), loader(layout, 5))


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
        ([Opened], LAYOUTS["pp2_1f1b"], "parallel_plan.units is 'Sequential': the model's forward goes through the parts"),
        ([Dropped], LAYOUTS["pp2_1f1b"], "the pipeline is cut after a unit that this step has left out"),
        ([MarksLate], LAYOUTS["dp2_zero3"], "register_hook is"),
        ([Saves], LAYOUTS["pp2_1f1b"], "save_pretrained is 'called on a part of the model'"),
        ([ByHand], ContractLayout("by_hand", 2, 2, {"sharding": "zero1"}), "training_step is 'the gradient of a weight'"),
        ([CountsInLayers], LAYOUTS["pp2_1f1b"], "self.log is 'hit_0': a layer of an earlier pipeline stage logs"),
        ([DeepLoss], LAYOUTS["pp2_1f1b"], "is made of a value that an earlier unit has made"),
        ([Collected], LAYOUTS["pp2_1f1b"], "module is 'CollectingModel': it returns what a part of a unit has made"),
        (_gathers_rows, LAYOUTS["dp2"], "self.all_gather is 'called with tensors of other shapes'"),
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
    [([NormInTheLoss, ReadsWeights], LAYOUTS["tp2"]), ([ReadsWeights], TP2_SP), ([LooksOn, LogsInLayers], LAYOUTS["pp2_1f1b"])],
)
def test_what_is_right_is_not_refused(run: Any, layout: ContractLayout) -> None:
    run, name = _of(run)
    result, why = compare_item(Item(f"right_{name}", 3, run, relative=4e-6), layout)
    assert result == "same", "\n".join(why[:10])


def _told_of_sums(layout: ContractLayout) -> list[int]:
    """How often this rank says that a loss is a sum: of one that is, and of a mean."""
    told = []
    for kind in (SumsUp, Module):
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            make_trainer(layout, max_epochs=2).fit(kind(), loader(layout, 8))
        told.append(sum("the loss of training_step is a sum over its rows" in str(each.message) for each in seen))
    return told


def test_the_user_is_told_once_that_a_loss_which_is_a_sum_counts_as_a_mean() -> None:
    assert run_ranks(_told_of_sums, 2, LAYOUTS["dp2"], process_group=False) == [[1, 0], [0, 0]]
