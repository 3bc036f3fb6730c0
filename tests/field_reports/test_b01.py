"""B01, kind of fault: the size of the first micro-batch is taken for the size of all.

Micro-batches that differ by a row, batches whose rows, sequence length or number of micro-batches change from step to step,
tensors without a batch dimension: all give the numbers of one process.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, Sampler

from hybrid_strategy import ParallelPlan
from tests.support.gate import gate
from tests.support.stacks import Blocks, Rows

SCHEDULES = ["sequential", "GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]


class Batches(Sampler[list[int]]):
    """Consecutive batches of the given sizes."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes

    def __iter__(self) -> Iterator[list[int]]:
        start = 0
        for size in self.sizes:
            yield list(range(start, start + size))
            start += size

    def __len__(self) -> int:
        return len(self.sizes)


class Masked(Blocks):
    """Its batch holds a mask without a batch dimension, as large as the batch in one dimension by chance."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return F.mse_loss(self.model(batch["inputs"] * batch["mask"]), batch["targets"])


def masked(rows: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """Collates; the mask is `[length, 6]`."""
    inputs, targets = (torch.stack(each) for each in zip(*rows, strict=True))
    return {"inputs": inputs, "targets": targets, "mask": (torch.arange(inputs.shape[1]) % 3 > 0)[:, None].expand(-1, 6)}


def _loader(sizes: list[int], lengths: list[int] | None = None, **options: Any) -> DataLoader[Any]:
    lengths = lengths or [4] * len(sizes)
    rows = Rows([length for size, length in zip(sizes, lengths, strict=True) for _ in range(size)])
    return DataLoader(rows, batch_sampler=Batches(sizes), **options)


@pytest.mark.parametrize("num_microbatches", [1, 2, 3, 4])
def test_batches_of_five_to_nine_rows(num_microbatches: int) -> None:
    strategy = {"pipeline_parallel_size": 2, "num_microbatches": num_microbatches}
    report = gate(Blocks, _loader([7, 5, 9, 6, 8]), strategy, steps=5)
    assert report.same, str(report)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_rows_and_lengths_change_from_step_to_step(schedule: str) -> None:
    data = _loader([7, 5, 9, 2, 7], lengths=[4, 8, 3, 8, 5])
    strategy = {"pipeline_parallel_size": 2, "num_microbatches": 3, "schedule": schedule}
    report = gate(Blocks, data, strategy, steps=5)
    assert report.same, str(report)


@pytest.mark.parametrize("micro_batch_size", [1, 3, 4, 100])
def test_a_micro_batch_size_that_does_not_divide(micro_batch_size: int) -> None:
    strategy = {"pipeline_parallel_size": 2, "micro_batch_size": micro_batch_size}
    report = gate(Blocks, _loader([7, 5, 9, 6, 8]), strategy, steps=5)
    assert report.same, str(report)


@pytest.mark.parametrize("sharding", ["ddp", "zero1", "zero3"])
@pytest.mark.parametrize("rows", [10, 11, 13])
def test_the_short_last_batch_of_an_epoch_over_data_parallel_pipelines(sharding: str, rows: int) -> None:
    data = DataLoader(Rows([4] * rows), batch_size=4, shuffle=True)
    strategy = {"pipeline_parallel_size": 2, "data_parallel_size": 2, "num_microbatches": 3, "sharding": sharding}
    report = gate(Blocks, data, strategy, steps=3)
    assert report.same, str(report)


def test_the_short_last_batch_inside_an_accumulation_window() -> None:
    data = DataLoader(Rows([4] * 11), batch_size=4, shuffle=True)
    strategy = {"pipeline_parallel_size": 2, "num_microbatches": 3, "schedule": "GPipe"}
    report = gate(Blocks, data, strategy, steps=2, trainer={"accumulate_grad_batches": 3})
    assert report.same, str(report)


def test_a_tensor_without_a_batch_dimension_passes_whole() -> None:
    data = _loader([4, 4, 3], lengths=[4, 3, 3], collate_fn=masked)
    plan = ParallelPlan(units=("layers.*", "head"), batch_dims={"mask": None})
    strategy = {"pipeline_parallel_size": 2, "num_microbatches": 3, "parallel_plan": plan}
    report = gate(Masked, data, strategy, steps=3)
    assert report.same, str(report)
