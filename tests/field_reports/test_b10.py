"""B10, kind of fault: something that has no gradient stops the pipeline, or starts to train.

Frozen first, last or middle parts, adapters only, an output that the next stage ignores, unfreezing in mid-run: frozen weights
keep their bits, what trains has one process's gradients.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from hybrid_strategy.spec.parallel_plan import ParallelPlan
from tests.support.gate import gate
from tests.support.training import SHAPE, TinyLM, Tokens

PIPELINE = {"pipeline_parallel_size": 2, "num_microbatches": 2}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "pp2": (2, PIPELINE),
    "pp2_zero_bubble": (2, {**PIPELINE, "schedule": "ZBVZeroBubble"}),
    "dp2_zero3": (2, {"sharding": "zero3"}),
    "dp2_pp2_zero1": (4, {**PIPELINE, "sharding": "zero1"}),
}
FROZEN = {
    "first": ("embed_tokens", "layers.0", "layers.1"),
    "last": ("layers.2", "layers.3", "norm", "lm_head"),
    "embedding": ("embed_tokens",),
    "all_but_norms": ("embed_tokens", "layers.*.self_attn", "layers.*.mlp", "lm_head"),
}


class Frozen(TinyLM):
    """Does not train the named parts."""

    def __init__(self, parts: tuple[str, ...]) -> None:
        super().__init__(SHAPE)
        self.parts = parts

    def configure_model(self) -> None:
        super().configure_model()
        assert self.model is not None
        for part in self.parts:
            for number in range(4) if "*" in part else [0]:
                self.model.get_submodule(part.replace("*", str(number))).requires_grad_(False)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([each for each in self.parameters() if each.requires_grad], lr=1e-3)


def _data() -> DataLoader[Any]:
    return DataLoader(Tokens(32), batch_size=4)


@pytest.mark.parametrize("parts", FROZEN)
@pytest.mark.parametrize("name", LAYOUTS)
def test_frozen_parts(name: str, parts: str) -> None:
    devices, strategy = LAYOUTS[name]
    report = gate(partial(Frozen, FROZEN[parts]), _data(), strategy, devices=devices, steps=3)
    assert report.same, str(report)


class Unfreezes(TinyLM):
    """Trains its first layers from the second step on."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        assert self.model is not None
        for name in ("embed_tokens", "layers.0"):
            self.model.get_submodule(name).requires_grad_(batch_idx > 0)


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_is_unfrozen_in_mid_run_trains_from_then_on(name: str) -> None:
    devices, strategy = LAYOUTS[name]
    report = gate(Unfreezes, _data(), strategy, devices=devices, steps=3)
    assert report.same, str(report)


class Layer(nn.Module):
    """Hands on a second tensor, which the next one does not look at, and a whole number."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, values: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        x, _, count = values
        return x + torch.tanh(self.linear(x)), self.linear(x), count + 1


class Ignores(nn.Module):
    """Of what a layer hands on only one tensor is used."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 16)
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.head = nn.Linear(16, 64)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        values = (x, x, torch.zeros((), dtype=torch.long))
        for layer in self.layers:
            values = layer(values)
        return self.head(values[0])

    def parallel_plan(self) -> ParallelPlan:
        return ParallelPlan(units=("embedding", "layers.*", "head"))


class IgnoresModule(pl.LightningModule):
    """Trains it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = Ignores()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("name", LAYOUTS)
def test_an_output_that_the_next_stage_ignores(name: str) -> None:
    devices, strategy = LAYOUTS[name]
    report = gate(IgnoresModule, _data(), strategy, devices=devices, steps=2)
    assert report.same, str(report)
