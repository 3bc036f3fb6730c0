"""A LightningModule that does what it is told to: fail, ask for too much memory, die, be slow."""

from __future__ import annotations

import os
import time

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader


class Unruly(pl.LightningModule):
    """`kind`: `good`, `raise`, `memory`, `die`, `slow`, on rank `rank` at step `at`; `early` raises when the module is made."""

    def __init__(self, kind: str = "good", rank: int = 1, at: int = 2, step_seconds: float = 0.0, text: str = "") -> None:
        super().__init__()
        torch.set_num_threads(1)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
        self.kind, self.rank, self.at, self.step_seconds, self.text = kind, rank, at, step_seconds, text
        if kind == "early" and int(os.environ.get("RANK") or os.environ["SLURM_PROCID"]) == rank:
            _fail()

    def on_fit_start(self) -> None:
        print(f"text is {self.text!r}", flush=True)  # noqa: T201

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        time.sleep(self.step_seconds)
        if self.global_rank != self.rank or self.global_step < self.at:
            return
        if self.kind == "raise":
            _fail()
        if self.kind == "memory":
            torch.empty(2**50, dtype=torch.uint8)
        if self.kind == "die":
            os._exit(7)
        if self.kind == "slow":
            time.sleep(0.6)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = nn.functional.mse_loss(self.model(batch), batch.sum(1, keepdim=True))
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-2)


def _fail() -> None:
    words = f"made to fail at {time.time():.3f}"
    print(words, flush=True)  # noqa: T201
    raise ValueError(words)


class UnrulyData(pl.LightningDataModule):
    """Random numbers; a batch of 8 for each data-parallel rank."""

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(torch.randn(4096, 4, generator=torch.Generator().manual_seed(0)), 8, shuffle=True)
