"""A LightningModule and data of a user's own, for runs of `hybrid train` in tests."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader


class OwnModule(pl.LightningModule):
    """Learns to add up; leaves what it was given in `record`, fails where it is told to."""

    def __init__(self, width: int = 8, record: str = "", fail_rank: int = -1, fail_step: int = 0, **texts: Any) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))
        self.fail_rank, self.fail_step = fail_rank, fail_step
        if record:
            Path(record, f"given{os.environ['RANK']}.json").write_text(json.dumps(texts))

    def _loss(self, batch: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.model(batch), batch.sum(1, keepdim=True))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self._loss(batch)
        self.log("train_loss", loss)
        return loss

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        if self.global_rank == self.fail_rank and self.global_step >= self.fail_step:
            raise ValueError("made to fail")

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self._loss(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class OwnData(pl.LightningDataModule):
    """Random numbers."""

    def __init__(self, batch_size: int = 8) -> None:
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(torch.randn(64, 4, generator=torch.Generator().manual_seed(0)), self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(torch.randn(16, 4, generator=torch.Generator().manual_seed(1)), self.batch_size)
