"""B69, kind of fault: memory grows from step to step, or is not given back between runs in one process.

After the first steps the number of live tensors does not change, though steps return their logits; after each fit its parameters
are gone.
"""

from __future__ import annotations

import gc
import time
from typing import Any

import lightning.pytorch as pl
import pytest
from torch import Tensor

from tests.contract.layouts import LAYOUTS
from tests.contract.models import Module, loader, make_trainer, quiet
from tests.support.ranks import run_ranks

STEPS, SETTLED, FITS = 60, 15, 4


def _live() -> int:
    """Live tensors. A collective's thread may hold one for a moment after the work is done: what is left behind stays."""
    counts = []
    for _ in range(3):
        gc.collect()
        counts.append(sum(isinstance(each, Tensor) for each in gc.get_objects()))
        time.sleep(0.02)
    return min(counts)


class Returning(Module):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        logits = self.model(batch["ids"])
        loss = self.loss(batch)
        self.log("loss", loss, on_epoch=True, prog_bar=True)
        return {"loss": loss, "logits": logits}


class Counting(pl.Callback):
    def __init__(self) -> None:
        self.counts: list[int] = []

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, batch: Any, index: int) -> None:
        if index >= SETTLED and index % 15 == 0:
            self.counts.append(_live())


def _steps(name: str) -> list[int]:
    layout, counting = LAYOUTS[name], Counting()
    with quiet():
        make_trainer(layout, max_steps=STEPS, callbacks=[counting]).fit(Returning(), loader(layout, 8 * STEPS))
    return counting.counts


def _fits(name: str) -> list[int]:
    layout, found = LAYOUTS[name], []
    with quiet():
        for _ in range(FITS):
            trainer, module = make_trainer(layout, max_steps=3), Returning()
            trainer.fit(module, loader(layout, 24), loader(layout, 8))
            del trainer, module
            found.append(_live())
    return found


@pytest.mark.parametrize("layout", ["single", "pp2_1f1b", "dp2_zero3"])
def test_steps_leave_nothing_behind(layout: str) -> None:
    for counts in run_ranks(_steps, LAYOUTS[layout].world_size, layout, process_group=False):
        assert len(set(counts[1:])) == 1, counts


@pytest.mark.parametrize("layout", ["single", "pp2_1f1b", "dp2_zero3"])
def test_fits_leave_nothing_behind(layout: str) -> None:
    for found in run_ranks(_fits, LAYOUTS[layout].world_size, layout, process_group=False):
        assert found[-1] == found[1], found
