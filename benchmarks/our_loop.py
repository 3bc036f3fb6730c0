"""The reference model of the benchmarks as an ordinary module through the Trainer."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from bare_loops import SEED, SHAPE, loss_of, optimizer_of
from torch.utils.data import DataLoader

from hybrid_strategy import HybridParallelStrategy
from hybrid_strategy.models.llama import PART as LLAMA


class Module(pl.LightningModule):
    """Knows nothing of parallelism; a batch is rows of tokens, one longer than the sequence."""

    def configure_model(self) -> None:
        if not hasattr(self, "model"):
            with torch.device("meta"):
                self.model = LLAMA.build(SHAPE)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return loss_of(self.model(batch[:, :-1]), batch[:, 1:])

    def configure_optimizers(self) -> Any:
        return optimizer_of(self.parameters())


def train_ours(strategy: dict[str, Any], processes: int, data: tuple[Any, int], callback: pl.Callback, steps: int) -> None:
    """Trains so many steps on `data`: tokens, and the rows of a batch of one data-parallel rank."""
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=processes,
        strategy=HybridParallelStrategy(**strategy, seed=SEED),
        callbacks=[callback],
        max_steps=steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    tokens, rows = data
    trainer.fit(Module(), DataLoader(tokens, batch_size=rows))
