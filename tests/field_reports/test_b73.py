"""B73, kind of fault: a number that is not finite is seen by one rank alone, or by none, and nobody says where it came from.

All ranks decide alike from the run's loss and the whole model's gradient norm; what is told is the place where it came from: the
samples, the module, the micro-batch, the rank.
"""

from __future__ import annotations

import math
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from hybrid_strategy.callbacks.non_finite import NonFiniteGuard
from hybrid_strategy.errors import ConfigError, RunError
from tests.contract.layouts import LAYOUTS
from tests.contract.models import LossRecorder, Module, Rows, make_trainer, quiet, row_losses
from tests.support.ranks import run_ranks

BAD_SAMPLE, BAD_STEP = 13, 1
SOURCES = ("sample", "weight", "gradient", "loss")


class Scaled(Rows):
    """Each row has a factor of its own; one may be NaN."""

    def __init__(self, bad: bool) -> None:
        super().__init__(32)
        self.bad = bad

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        scale = torch.tensor(torch.nan if self.bad and index == BAD_SAMPLE else 1.0)
        return {**super().__getitem__(index), "scale": scale}


class Fragile(Module):
    source = ""

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        losses = row_losses(self.model(batch["ids"]), batch["labels"]) * batch["scale"]
        if self.source == "loss" and bool((batch["row"] == BAD_SAMPLE).any()):
            return losses.mean() / 0.0
        return losses.mean()


class Plant(pl.Callback):
    """Puts it into a weight before the second step, or into a gradient of the last rank in it."""

    def __init__(self, source: str) -> None:
        self.source = source

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, index: int) -> None:
        for name, parameter in module.named_parameters():
            if self.source == "weight" and index == BAD_STEP and name == "model.layers.3.mlp.up.weight" and parameter.numel():
                parameter.data.view(-1)[0] = torch.nan
        trainer.strategy.made.sharding.mark_changed()

    def on_after_backward(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        last = trainer.global_rank == trainer.world_size - 1
        if self.source == "gradient" and last and trainer.global_step == BAD_STEP:
            named = dict(module.named_parameters())
            named["model.layers.3.mlp.up.weight"].grad.view(-1)[0] = torch.inf  # in every layout the last rank owns some of it


def _run(name: str, source: str, action: str) -> Any:
    layout, guard, losses = LAYOUTS[name], NonFiniteGuard(action), LossRecorder()
    module = Fragile()
    module.source = source
    data = DataLoader(Scaled(source == "sample"), batch_size=layout.batch_size)
    told = ""
    with quiet():
        trainer = make_trainer(layout, max_epochs=1, callbacks=[Plant(source), guard, losses], gradient_clip_val=1.0)
        try:
            trainer.fit(module, data)
        except RunError as error:
            told = str(error)
    return told, guard.skipped, losses.losses


def _all(name: str, action: str) -> Any:
    return {source: _run(name, source, action) for source in SOURCES}


def _rank(rank: int, pipeline: int, data: int) -> str:
    return f"rank {rank} (pipeline_parallel {pipeline}, data_parallel {data}, tensor_parallel 0)"


IN_BATCH, IN_WEIGHT = "the batch holds it", "model.layers.3.mlp.up makes it: its weight is not finite"
IN_GRADIENT, IN_STEP = "forward is finite; gradients that are not: ", "training_step makes it from finite outputs of its modules"
PLACES = {
    "dp2": {
        "sample": f"{_rank(1, 0, 1)}, micro-batch 0, samples 13: {IN_BATCH}",
        "weight": f"micro-batch 0, samples 8, 9, 10, 11: {IN_WEIGHT}",
        "loss": f"micro-batch 0, samples 12, 13, 14, 15: {IN_STEP}",
    },
    "dp2_zero3": {
        "sample": f"{_rank(1, 0, 1)}, micro-batch 0, samples 13: {IN_BATCH}",
        "weight": IN_WEIGHT,
        "gradient": f"{_rank(1, 0, 1)}: {IN_GRADIENT}",
    },
    "tp2": {"sample": f"samples 13: {IN_BATCH}", "gradient": f"tensor_parallel 1): {IN_GRADIENT}"},
    "pp2_1f1b": {
        "sample": f"{_rank(0, 0, 0)}, micro-batch 2, samples 13: {IN_BATCH}",
        "weight": f"{_rank(1, 1, 0)}, micro-batch 0, samples 8, 9: {IN_WEIGHT}",
        "gradient": f"{_rank(1, 1, 0)}: {IN_GRADIENT}",
        "loss": f"micro-batch 2, samples 12, 13: {IN_STEP}",
    },
}


@pytest.mark.parametrize("layout", PLACES)
def test_all_ranks_stop_and_the_place_is_told(layout: str) -> None:
    ranks = run_ranks(_all, LAYOUTS[layout].world_size, layout, "stop", process_group=False, timeout=90)
    for source, words in PLACES[layout].items():
        texts = [rank[source][0] for rank in ranks]
        assert all(text == texts[0] for text in texts), texts
        assert words in texts[0]
        assert f"not so in step {BAD_STEP}" in texts[0]


@pytest.mark.parametrize("layout", ["dp2_zero3", "pp2_1f1b"])
def test_all_ranks_leave_the_step_out_together(layout: str) -> None:
    ranks = run_ranks(_all, LAYOUTS[layout].world_size, layout, "skip", process_group=False, timeout=90)
    for source in ("sample", "gradient", "loss"):
        for _, skipped, losses in [rank[source] for rank in ranks]:
            assert skipped == 1
            assert len(losses) == 4
            assert math.isfinite(losses[3])
            assert losses == pytest.approx(ranks[0][source][2], nan_ok=True)


def test_an_unknown_action_is_refused() -> None:
    with pytest.raises(ConfigError, match="action is 'halt'"):
        NonFiniteGuard("halt")
