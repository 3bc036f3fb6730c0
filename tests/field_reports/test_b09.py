"""B09, kind of fault: a weight that a stage uses more than once has a wrong gradient where the backward pass is split."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from hybrid_strategy.spec.parallel_plan import ParallelPlan
from tests.support.gate import gate
from tests.support.training import Tokens

SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")


class Twice(nn.Module):
    """Applies one linear layer, then a second time to what came out, and adds a product of its weight with itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        once = torch.tanh(self.linear(x))
        return x + self.linear(once) @ self.linear.weight


class Model(nn.Module):
    """A stack of them between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 16)
        self.layers = nn.ModuleList(Twice() for _ in range(4))
        self.head = nn.Linear(16, 64)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

    def parallel_plan(self) -> ParallelPlan:
        return ParallelPlan(units=("embedding", "layers.*", "head"))


class Shared(pl.LightningModule):
    """Trains it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = Model()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_layer_used_twice_has_the_gradient_of_one_process(schedule: str) -> None:
    strategy: dict[str, Any] = {"pipeline_parallel_size": 2, "num_microbatches": 4, "schedule": schedule}
    report = gate(Shared, DataLoader(Tokens(32), batch_size=8), strategy, devices=2)
    assert report.same, str(report)
