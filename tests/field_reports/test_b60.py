"""B60, kind of fault: every rank takes itself for the first one and makes a W&B run; or it lacks what only the last stage knows.

One run, of the first rank, in which the loss is that the last stage has computed, whoever touches the logger and when.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from hybrid_strategy.reporting.wandb_run import WandbRunLogger
from tests.contract.layouts import LAYOUTS
from tests.contract.models import Module, loader, make_trainer, quiet
from tests.support.ranks import run_ranks
from tests.support.wandb_files import history, runs


class Logs(Module):
    """Logs its loss, and touches the run in a hook of every rank."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss)
        return loss

    def on_fit_start(self) -> None:
        _ = self.logger.experiment.config  # type: ignore[union-attr]


def _fit(name: str, folder: str) -> float:
    layout = LAYOUTS[name]
    logger = WandbRunLogger(save_dir=folder, mode="offline")
    with quiet():
        trainer: Any = make_trainer(layout, max_steps=3, logger=logger)
        try:
            trainer.fit(Logs(), loader(layout, 16))
        finally:
            logger.finish()
    return float(trainer.callback_metrics["train_loss"])


@pytest.mark.parametrize("layout", ["pp2_1f1b", "dp2"])
def test_one_run_with_the_loss_of_the_last_stage(layout: str, tmp_path: Path) -> None:
    losses = run_ranks(_fit, 2, layout, str(tmp_path), process_group=False, timeout=60)
    (run,) = runs(tmp_path)
    logged = [row["train_loss"] for row in history(run) if "train_loss" in row]
    assert len(logged) == 3
    assert logged[-1] == pytest.approx(losses[0])
