"""A Lightning script of your own: the only line about parallelism is the strategy.

torchrun --nproc-per-node 2 examples/plain_lightning.py          # or plain `python`: Lightning starts the second process
"""

from __future__ import annotations

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from hybrid_strategy import HybridParallelStrategy


class Classifier(pl.LightningModule):
    """Written as for one device."""

    def __init__(self, width: int = 64, depth: int = 4) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(depth)]
        self.model = nn.Sequential(nn.Linear(16, width), *blocks, nn.Linear(width, 4))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        inputs, labels = batch
        loss = nn.functional.cross_entropy(self.model(inputs), labels)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        inputs, labels = batch
        self.log("val_loss", nn.functional.cross_entropy(self.model(inputs), labels))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def loader(num_samples: int, seed: int) -> DataLoader[tuple[Tensor, ...]]:
    """Points whose class is the quadrant that the sums of their halves lie in."""
    points = torch.randn(num_samples, 16, generator=torch.Generator().manual_seed(seed))
    labels = 2 * (points[:, :8].sum(1) > 0).long() + (points[:, 8:].sum(1) > 0).long()
    return DataLoader(TensorDataset(points, labels), batch_size=32, shuffle=seed == 0)


if __name__ == "__main__":
    strategy = HybridParallelStrategy(pipeline_parallel_size=2, schedule="1F1B", num_microbatches=4)
    trainer = pl.Trainer(accelerator="cpu", devices=2, strategy=strategy, max_epochs=3, logger=False, enable_checkpointing=False)
    trainer.fit(Classifier(), loader(1024, seed=0), loader(256, seed=1))
    if trainer.is_global_zero:
        print(f"val_loss {trainer.callback_metrics['val_loss']:.4f}")
