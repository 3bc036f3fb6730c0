"""B24, kind of fault: gradients that are large or tiny are lost in what the ranks send each other.

Each rank's share is in the gradient before the sum, and sums are made in the gradient's own type, so that neither 70 000 on every
rank nor 1e-8 is lost, with a loss scaler, under accumulation, in shards.
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.contract.layouts import LAYOUTS, ContractLayout
from tests.contract.models import make_trainer, quiet
from tests.support.ranks import run_ranks

SIZES = (6e4, 7e4, 1e-8)


class Slopes(pl.LightningModule):
    """One parameter for each size; its gradient is that size, whatever the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Linear(1, len(SIZES), bias=False)
        nn.init.zeros_(self.model.weight)
        self.seen: list[float] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return (self.model.weight[:, 0] * torch.tensor(SIZES)).sum() + batch[0].sum() * 0.0

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def _weights(layout: ContractLayout, half: bool) -> list[float]:
    plugins = [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**10))] if half else []
    data = DataLoader(TensorDataset(torch.ones(32, 1)), batch_size=layout.batch_size)
    module = Slopes()
    with quiet():
        trainer = make_trainer(layout, max_steps=1, accumulate_grad_batches=2, plugins=plugins)
        trainer.fit(module, data)
    made = trainer.strategy.made
    made.sharding.begin()
    found = made.slots[0].parameter.detach().flatten().tolist()
    made.sharding.end()
    return found


def _all(layout: ContractLayout) -> list[list[float]]:
    return [_weights(layout, half) for half in (False, True)]


@pytest.mark.parametrize("layout", ["dp2", "dp2_zero1", "dp2_zero3"])
def test_no_size_is_lost(layout: str) -> None:
    for rank in run_ranks(_all, 2, LAYOUTS[layout], process_group=False):
        for weights in rank:
            assert weights == pytest.approx([-each for each in SIZES], rel=1e-5)
