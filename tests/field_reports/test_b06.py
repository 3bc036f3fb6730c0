"""B06, kind of fault: a model of which only a part is split cannot be clipped, or not be stepped by a fast optimizer.

Every parameter is a plain tensor, split or not: one norm over all, and foreach and fused optimizers as they are.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from hybrid_strategy.models.llama import Llama
from hybrid_strategy.spec.parallel_plan import ParallelPlan
from tests.support.gate import gate
from tests.support.training import TinyLM, Tokens

FLAGS: dict[str, dict[str, Any]] = {
    "foreach": {"foreach": True},
    "fused": {"fused": True},
    "plain": {"foreach": False, "fused": False},
}


class MlpsOnly(Llama):
    """Splits its MLPs; attention, norms, embedding and head stay whole on every rank."""

    def parallel_plan(self) -> ParallelPlan:
        whole = super().parallel_plan()
        return replace(whole, tensor={name: style for name, style in whole.tensor.items() if ".mlp" in name}, heads={})


class PartlySplit(TinyLM):
    """Trains it with AdamW as told."""

    def __init__(self, flags: dict[str, Any]) -> None:
        super().__init__()
        self.flags = flags

    def configure_model(self) -> None:
        if self.model is None:
            with torch.device("meta"):
                self.model = MlpsOnly(self.shape)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3, **self.flags)


def _data() -> DataLoader[Any]:
    return DataLoader(Tokens(32), batch_size=8)


@pytest.mark.parametrize("flags", FLAGS)
def test_a_partly_split_model_is_clipped_and_stepped_as_in_one_process(flags: str) -> None:
    trainer = {"gradient_clip_val": 0.5}
    report = gate(partial(PartlySplit, FLAGS[flags]), _data(), {"tensor_parallel_size": 2}, devices=2, trainer=trainer, steps=3)
    assert report.same, str(report)
    assert any(row.quantity == "clipped gradients" for row in report.rows)


class OwnMlp(pl.LightningModule):
    """Two linear layers with a norm between that no plan names."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Embedding(64, 16), nn.LayerNorm(16), nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 64))

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        return nn.functional.cross_entropy(self.model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3, fused=True)


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_a_users_model_with_a_plan_for_some_layers(algorithm: str) -> None:
    plan = {"tensor": {"2": "colwise", "4": "rowwise"}}
    trainer = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": algorithm}
    strategy = {"tensor_parallel_size": 2, "parallel_plan": plan}
    report = gate(OwnMlp, _data(), strategy, devices=2, trainer=trainer, steps=3)
    assert report.same, str(report)
