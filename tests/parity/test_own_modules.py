"""Modules that tell nothing of themselves: every sharding, recomputation, precision and micro-batch count is right for them."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
from torch import Tensor, nn

from hybrid_strategy import HybridParallelStrategy
from tests.parity.own import NeedsConfiguring, OwnData, OwnModule
from tests.support.gate import gate
from tests.support.ranks import run_ranks


@pytest.mark.parametrize("module", [OwnModule, NeedsConfiguring])
@pytest.mark.parametrize("sharding", ["ddp", "zero1", "zero2", "zero3"])
def test_every_sharding(module: Any, sharding: str) -> None:
    report = gate(module, OwnData, {"sharding": sharding, "num_microbatches": 2}, devices=2)
    assert report.same, str(report)


@pytest.mark.parametrize("kind", ["selective", "full"])
@pytest.mark.parametrize("sharding", ["ddp", "zero3"])
def test_recomputation(kind: str, sharding: str) -> None:
    report = gate(OwnModule, OwnData, {"activation_checkpoint": kind, "sharding": sharding}, devices=2)
    assert report.same, str(report)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "64-true"])
def test_precision(precision: str) -> None:
    report = gate(OwnModule, OwnData, {"num_microbatches": 2}, devices=2, trainer={"precision": precision})
    assert report.same, str(report)


class _Counted(nn.Linear):
    calls = 0

    def forward(self, inputs: Tensor) -> Tensor:
        _Counted.calls += 1
        return super().forward(inputs)


class _CountingModule(OwnModule):
    def __init__(self) -> None:
        super().__init__()
        self.middle = nn.ModuleList(_Counted(16, 16) for _ in range(3))


def _calls(kind: str) -> int:
    _Counted.calls = 0
    strategy = HybridParallelStrategy(activation_checkpoint=kind)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    pl.Trainer(accelerator="cpu", devices=1, strategy=strategy, max_steps=1, **quiet).fit(_CountingModule(), OwnData())
    return _Counted.calls


def test_layers_of_a_module_without_a_plan_are_recomputed() -> None:
    assert [run_ranks(_calls, 1, kind, process_group=False)[0] for kind in ("none", "full")] == [3, 6]
