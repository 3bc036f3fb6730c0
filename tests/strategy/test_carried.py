"""Values that go past cuts of a pipeline: carried where the plan says so, else refused by name on every rank, before a step."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from hybrid_strategy import ParallelPlan
from tests.contract import own_models
from tests.contract.items import Item, compare_item
from tests.contract.layouts import LAYOUTS, ContractLayout
from tests.contract.model_items import Fitting, _rows, _train
from tests.contract.models import LossRecorder, make_trainer

_PIPELINE = {"pipeline_parallel_size": 2, "num_microbatches": 4}
GPIPE = ContractLayout("pp2_gpipe", 2, 1, {**_PIPELINE, "schedule": "GPipe", "activation_checkpoint": "full"})
ZERO3 = ContractLayout("dp2_pp2_zero3", 4, 2, {**_PIPELINE, "sharding": "zero3", "num_microbatches": 2})
CONTEXT = ContractLayout("cp2_pp2", 4, 1, {**_PIPELINE, "context_parallel_size": 2})
PP4 = ContractLayout("pp4", 4, 1, {**_PIPELINE, "pipeline_parallel_size": 4})


class UNet(nn.Module):
    """`[b, 3, p, p]` -> `[b, classes]`: what goes down meets what comes up, in other shapes."""

    plan = ParallelPlan(units=("stem", "down.*", "middle", "up.*", "head"))

    def __init__(self) -> None:
        super().__init__()
        widths = (4, 6, 8)
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.down = nn.ModuleList(nn.Conv2d(a, b, 3, stride=2, padding=1) for a, b in pairwise(widths))
        self.middle = nn.Conv2d(8, 8, 3, padding=1)
        self.up = nn.ModuleList(nn.Conv2d(2 * b, a, 3, padding=1) for b, a in pairwise(widths[::-1]))
        self.head = nn.Linear(4, own_models.CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x, seen = self.stem(images), []
        for layer in self.down:
            x = layer(x).relu()
            seen.append(x)
        x = self.middle(x)
        for layer in self.up:
            x = nn.functional.interpolate(layer(torch.cat([x, seen.pop()], 1)).relu(), scale_factor=2.0)
        return self.head(x.mean((2, 3)))


class CarryingUNet(UNet):
    plan = ParallelPlan(units=UNet.plan.units, carried=("down.*",))


class CarryingDecoder(own_models.Careless):
    plan = ParallelPlan(units=own_models.Careless.plan.units, tensor=own_models.Careless.plan.tensor, carried=("encoder.1",))


class CarryingSkips(own_models.SkipOutside):
    plan = ParallelPlan(units=own_models.SkipOutside.plan.units, carried=("stem", "body.*"))


class DeepLoss(own_models.ConvNet):
    """What it returns is made of an early layer's output, too."""

    plan = ParallelPlan(units=own_models.ConvNet.plan.units, carried=("body.0",))

    def forward(self, images: Tensor) -> Tensor:
        x = early = self.body[0](self.stem(images))
        for layer in self.body[1:]:
            x = layer(x)
        return self.head(x.mean((2, 3))) + early.mean()


class Pooled(CarryingDecoder):
    """A mask of whole numbers is made of an early unit's output."""

    plan = ParallelPlan(units=own_models.Careless.plan.units)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory = self.source(source)
        mask = (memory.sum(-1, keepdim=True) > 0).long()
        for layer in self.encoder:
            memory = layer(memory)
        pair = self.start(memory, target)
        for layer in self.decoder:
            pair = layer(pair[0], pair[1] * mask)
        return self.head(pair[1])


def _compare(kind: Any, layout: ContractLayout, words: str = "") -> None:
    images = issubclass(kind, UNet | own_models.ConvNet)
    run = partial(_train, kind, images, not images, True)
    item = Item(f"carried_{kind.__name__}", 8, run, refused={layout.name: words} if words else {})
    result, why = compare_item(item, layout)
    assert result == ("refused" if words else "same"), "\n".join(why[:10])


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        (CarryingUNet, LAYOUTS["pp2_1f1b"]),
        (CarryingUNet, LAYOUTS["pp2_zbv"]),
        (CarryingUNet, PP4),
        (CarryingDecoder, GPIPE),
        (CarryingDecoder, LAYOUTS["pp2_interleaved"]),
        (CarryingDecoder, LAYOUTS["tp2_pp2"]),
        (CarryingDecoder, CONTEXT),
        (CarryingSkips, LAYOUTS["pp2_zbv"]),
        (CarryingSkips, ZERO3),
        (DeepLoss, LAYOUTS["dp2_pp2"]),
    ],
)
def test_outputs_of_units_go_past_cuts_where_the_plan_carries_them(kind: Any, layout: ContractLayout) -> None:
    _compare(kind, layout)


@pytest.mark.parametrize(
    ("kind", "layout", "words"),
    [
        (UNet, LAYOUTS["pp2_1f1b"], "Set carried=('down.0', 'down.1',)"),
        (UNet, LAYOUTS["pp2_zbv"], "Set carried=("),
        (own_models.Careless, ZERO3, "Set carried=('encoder.1',) in parallel_plan()"),
        (own_models.Careless, LAYOUTS["tp2_pp2"], "encoder.1 made it, on another stage"),
        (own_models.Careless, CONTEXT, "decoder.0': it is given a value that an earlier unit has made"),
        (own_models.SkipOutside, LAYOUTS["pp2_interleaved"], "Set carried=('stem', 'body.0',"),
        (Pooled, LAYOUTS["pp2_1f1b"], "parallel_plan.units is 'decoder.0': it is given a value that an earlier unit"),
    ],
)
def test_what_is_not_carried_is_named(kind: Any, layout: ContractLayout, words: str) -> None:
    _compare(kind, layout, words)


class _FreezeLater(pl.Callback):
    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        for name, each in pl_module.named_parameters():
            if trainer.global_step == 2 and ("source" in name or "encoder" in name):
                each.requires_grad_(False)


def _freeze(kind: Any, layout: ContractLayout, folder: str) -> Any:
    losses, data = LossRecorder(), DataLoader(_rows(False, True), batch_size=layout.batch_size)
    make_trainer(layout, max_epochs=2, callbacks=[losses, _FreezeLater()]).fit(Fitting(kind, True), data)
    return {"losses": losses.losses}


@pytest.mark.parametrize("kind", [CarryingDecoder, own_models.EncoderDecoder])
def test_gradients_find_their_outputs_when_some_are_frozen_on_the_way(kind: Any) -> None:
    result, why = compare_item(Item(f"freeze_{kind.__name__}", 8, partial(_freeze, kind), relative=4e-6), LAYOUTS["pp2_1f1b"])
    assert result == "same", "\n".join(why[:10])


def _validate(kind: Any, layout: ContractLayout, folder: str) -> Any:
    rows = DataLoader(_rows(True, False), batch_size=layout.batch_size)
    return make_trainer(layout).validate(Fitting(kind, True), rows, verbose=False)[0]


@pytest.mark.parametrize(("kind", "words"), [(CarryingUNet, ""), (UNet, "Set carried=('down.0', 'down.1',)")])
def test_evaluation_alone_is_like_training(kind: Any, words: str) -> None:
    layout = LAYOUTS["pp2_interleaved"]
    item = Item(f"validate_{kind.__name__}", 8, partial(_validate, kind), refused={layout.name: words} if words else {})
    result, why = compare_item(item, layout)
    assert result == ("refused" if words else "same"), "\n".join(why[:10])
