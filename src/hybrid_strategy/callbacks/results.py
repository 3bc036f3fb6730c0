"""What a run has reached, for the closing summary and `result.json`."""

from __future__ import annotations

from math import isfinite
from typing import Any

import lightning.pytorch as pl

from hybrid_strategy.callbacks.throughput import Throughput
from hybrid_strategy.strategy.stopping import stop_path

_NAMES = ("val/loss", "val_loss", "validation/loss", "valid/loss", "loss/val")


class RunResults(pl.Callback):
    """Keeps the validation losses, in checkpoints too: the results of a run that goes on are those of all of it. The one before
    training is that of the sanity check, logged at step 0."""

    def __init__(self) -> None:
        self.validation: list[tuple[int, float]] = []
        self.metric: str | None = None
        self._begun_at = 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """A run that goes on begins at a later step, and Lightning leaves its sanity check out."""
        self._begun_at = trainer.global_step

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.metric is None:
            self.metric = next((name for name in _NAMES if name in trainer.callback_metrics), None)
        if self.metric is None or self.metric not in trainer.callback_metrics:
            return
        value = float(trainer.callback_metrics[self.metric])
        self.validation.append((trainer.global_step, value))
        if trainer.sanity_checking:  # Lightning forgets what a sanity check has logged
            for logger in trainer.loggers:
                logger.log_metrics({self.metric: value}, step=trainer.global_step)

    def state_dict(self) -> dict[str, Any]:
        return {"metric": self.metric, "validation": [list(each) for each in self.validation]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.metric = state_dict["metric"]
        self.validation = [(int(step), float(value)) for step, value in state_dict["validation"]]

    def stale(self, trainer: pl.Trainer) -> bool:
        """Has the model been trained on since it was last validated?"""
        if self.validation:
            return self.validation[-1][0] != trainer.global_step
        unseen = trainer.enable_validation and trainer.num_sanity_val_steps > 0
        return unseen and 0 < self._begun_at < trainer.global_step

    def summary(self, trainer: pl.Trainer) -> dict[str, Any]:
        """Plain values for `result.json`."""
        speed = next((each.mean_tokens_per_second for each in trainer.callbacks if isinstance(each, Throughput)), None)  # type: ignore[attr-defined]
        losses = [value for _, value in self.validation]
        return {
            "steps": trainer.global_step,
            "epochs": trainer.current_epoch,
            "validation_metric": self.metric,
            "first_validation_loss": losses[0] if losses else None,
            "last_validation_loss": losses[-1] if losses else None,
            "best_validation_loss": _best(losses),
            "tokens_per_second": speed,
            "checkpoint": _checkpoint(trainer),
            "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        }


def _best(losses: list[float]) -> float | None:
    """The least of those that are finite; where none is the last one; None where there is none at all."""
    return min(filter(isfinite, losses), default=losses[-1] if losses else None)


def _checkpoint(trainer: pl.Trainer) -> str | None:
    """The best one, or that of the last step where the run ended before its first interval."""
    if trainer.checkpoint_callback is None:
        return None
    best = getattr(trainer.checkpoint_callback, "best_model_path", "")
    last = stop_path(trainer)
    return best or (str(last) if last.exists() else None)
