"""A checkpoint of where training ended, where the intervals of the checkpoint callback left none."""

from __future__ import annotations

import lightning.pytorch as pl

from hybrid_strategy.strategy.checkpoint_hooks import CheckpointHooks
from hybrid_strategy.strategy.stopping import stop_path


class FinalCheckpoint(pl.Callback):
    """Saves the last step of a run that ends (`max_steps`, `max_epochs`, `max_time`, early stopping), unless it is saved already.

    Lightning's ModelCheckpoint saves at its intervals only, so that the steps after the last of them would be lost. There is one
    such folder, `last-stopped.ckpt` beside those of the first checkpoint callback; a run without one saves nothing.
    """

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Collective.

        Raises:
            CheckpointError: on every rank, if it could not be written (`checkpoint_error="raise"`).
        """
        strategy, is_trial = trainer.strategy, trainer.fast_dev_run  # type: ignore[attr-defined]
        if isinstance(strategy, CheckpointHooks) and trainer.checkpoint_callbacks and not is_trial:
            strategy.save_if_trained(stop_path(trainer))
