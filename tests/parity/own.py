"""Modules and data of a user's own: real weights, odd names, no plan, some with a fault of their own."""

from __future__ import annotations

import os
import time
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class OwnData(pl.LightningDataModule):
    """Rows to fit; `seen` is set up in `setup`, as data modules do."""

    def __init__(self, rows: int = 40, batch_size: int = 6) -> None:
        super().__init__()
        self.rows, self.batch_size = rows, batch_size
        self.data: TensorDataset | None = None

    def setup(self, stage: str | None = None) -> None:
        generator = torch.Generator().manual_seed(5)
        inputs = torch.randn(self.rows, 8, generator=generator)
        self.data = TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())

    def train_dataloader(self) -> DataLoader[Any]:
        assert self.data is not None
        return DataLoader(self.data, batch_size=self.batch_size, shuffle=True)


class OwnModule(pl.LightningModule):
    """Weights are real and drawn when the module is made."""

    def __init__(self, width: int = 16, reduction: str = "mean") -> None:
        super().__init__()
        self.reduction = reduction
        self.bottom = nn.Linear(8, width)
        self.middle = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.norm, self.drop = nn.LayerNorm(width), nn.Dropout(0.1)
        self.top = nn.Linear(width, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.bottom(inputs)
        for layer in self.middle:
            hidden = hidden + self.drop(layer(hidden).relu())
        return self.top(self.norm(hidden))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return F.mse_loss(self(batch[0]), batch[1], reduction=self.reduction)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class FailsOnRank1(OwnModule):
    """Raises where it is one of several."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        if os.environ.get("RANK") == "1":
            raise ValueError("the user's own fault")
        return super().training_step(batch, batch_idx)


class HangsOnRank1(OwnModule):
    """Waits for ever where it is one of several."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        while os.environ.get("RANK") == "1":
            time.sleep(0.1)
        return super().training_step(batch, batch_idx)


class NeedsConfiguring(OwnModule):
    """Draws its weights late, in `configure_model`, after other numbers were drawn."""

    def __init__(self) -> None:
        super().__init__()
        torch.rand(7 * int(os.environ.get("RANK", "0")))
        self.extra: nn.Module | None = None

    def configure_model(self) -> None:
        if self.extra is None:
            self.extra = nn.Linear(8, 8)

    def forward(self, inputs: Tensor) -> Tensor:
        assert self.extra is not None
        return super().forward(inputs + self.extra(inputs))
