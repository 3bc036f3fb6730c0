"""How far a fit goes."""

from __future__ import annotations

import lightning.pytorch as pl


def total_steps(trainer: pl.Trainer) -> float:
    """Optimizer steps of the whole fit; infinite where there is no end."""
    by_steps = float(trainer.max_steps) if trainer.max_steps >= 0 else float("inf")
    if trainer.max_epochs is None or trainer.max_epochs < 0:
        return by_steps
    batches = trainer.num_training_batches * trainer.max_epochs
    return min(by_steps, -(-batches // trainer.accumulate_grad_batches))
