"""The strategy by its name, which exists once `hybrid_strategy` is imported: all sizes are defaults, so it is data parallel."""

from __future__ import annotations

import lightning.pytorch as pl
from lightning.pytorch.demos.boring_classes import BoringModel

import hybrid_strategy  # noqa: F401  (this line makes the name known to Lightning)

if __name__ == "__main__":
    trainer = pl.Trainer(accelerator="cpu", devices=2, strategy="hybrid", max_steps=4, logger=False, enable_checkpointing=False)
    trainer.fit(BoringModel())
    if trainer.is_global_zero:
        print(f"trained {trainer.global_step} steps on {trainer.world_size} processes")
