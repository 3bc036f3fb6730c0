"""Small modules of layers in a row, and rows to fit: what tests of pipelines train where a language model would be too much."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from hybrid_strategy import ParallelPlan

WIDTH = 6


class Rows(Dataset[tuple[Tensor, Tensor]]):
    """Rows to fit; row `i` is `lengths[i]` long."""

    def __init__(self, lengths: list[int]) -> None:
        generator = torch.Generator().manual_seed(2)
        self.rows = [torch.randn(length, WIDTH, generator=generator) for length in lengths]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.rows[index], self.rows[index].sum(-1, keepdim=True)


class Stack(nn.Module):
    """Layers in a row, and a head."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(num_layers))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        for layer in self.layers:
            inputs = layer(inputs).tanh()
        return self.head(inputs)

    def parallel_plan(self) -> ParallelPlan:
        return ParallelPlan(units=("layers.*", "head"))


class Blocks(pl.LightningModule):
    """Fits rows with a stack that a pipeline may cut."""

    def __init__(self, num_layers: int = 4) -> None:
        super().__init__()
        self.model: nn.Module = Stack(num_layers)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.mse_loss(self.model(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", F.mse_loss(self.model(batch[0]), batch[1]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
