"""Keeps the newest checkpoints and the best ones, and removes the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning_utilities.core.rank_zero import rank_zero_warn

from hybrid_strategy.checkpoint.retention import Retention, remove_surplus
from hybrid_strategy.errors import ConfigError, message


class KeepCheckpoints(pl.Callback):
    """Prunes the folder of the first ModelCheckpoint, which must keep everything itself (`save_top_k=-1`).

    What any rule keeps is kept, and so are the one that `last` names and the one the run goes on from. Scores are those of the
    ModelCheckpoint's `monitor`.

    Args:
        keep_last: this many of the newest.
        keep_best: this many of the best.
        mode: `min` or `max`: which scores are good.

    Raises:
        ConfigError: a number is too small, or `mode` is another word.
    """

    def __init__(self, keep_last: int = 1, keep_best: int = 0, mode: str = "min") -> None:
        if mode not in ("min", "max"):
            raise ConfigError(message("mode", mode, "there is no such way", "", "Set min or max"))
        self._retention = Retention(keep_last, keep_best, mode == "max")

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        saver = trainer.checkpoint_callback
        if stage == "fit" and isinstance(saver, ModelCheckpoint) and saver.save_top_k != -1:
            rule = "it would remove what this callback keeps"
            raise ConfigError(message("save_top_k", saver.save_top_k, rule, "", "Set save_top_k=-1 for the ModelCheckpoint"))

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        self._prune(trainer)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """The last save is complete by now."""
        if stage == "fit":
            self._prune(trainer)

    def _prune(self, trainer: pl.Trainer) -> None:
        folder = getattr(trainer.checkpoint_callback, "dirpath", None)
        if trainer.is_global_zero and folder:
            came_from = trainer.ckpt_path
            try:
                remove_surplus(Path(folder), self._retention, [Path(came_from)] if came_from else [])
            except OSError as error:  # the other ranks would wait for this one
                rule = "what no rule keeps could not be removed from it"
                rank_zero_warn(message("dirpath", str(folder), rule, f"{type(error).__name__}: {error}", "Remove it by hand"))
