"""What an optimizer step sends is what the arithmetic says: calls and bytes, however many micro-batches it has."""

from __future__ import annotations

import dataclasses
from typing import Any

import lightning.pytorch as pl
import pytest

from tests.support.counting import counting
from tests.support.ranks import run_ranks
from tests.support.training import SHAPE, Case, train_here

# large enough for every payload to be larger than messages of logged values
WIDE = dataclasses.replace(SHAPE, hidden_size=64, intermediate_size=96, vocab_size=128)
ROWS, SEQUENCE, HIDDEN, LAYERS, FLOAT = 8, WIDE.sequence_length, WIDE.hidden_size, WIDE.num_layers, 4


class PerStep(pl.Callback):
    """Keeps the counts of each batch."""

    def __init__(self, counts: Any) -> None:
        self.counts, self.steps = counts, []

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, index: int) -> None:
        self.counts.clear()

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, batch: Any, index: int) -> None:
        self.steps.append((dict(self.counts.calls), dict(self.counts.num_bytes), dict(self.counts.small)))


def count_here(case: Case) -> list[Any]:
    with counting() as counts:
        callback = PerStep(counts)
        train_here(dataclasses.replace(case, trainer={**case.trainer, "callbacks": [callback]}))
    return callback.steps


def count(world_size: int, strategy: dict[str, Any], **more: Any) -> list[Any]:
    """Calls and bytes of the last batch, by rank."""
    case = Case(strategy=strategy, shape=WIDE, batch_size=ROWS, steps=3, **more)
    return [steps[-1] for steps in run_ranks(count_here, world_size, case, process_group=False)]


@pytest.mark.parametrize("microbatches", [1, 4])
def test_ddp_reduces_every_gradient_once(microbatches: int) -> None:
    for calls, num_bytes, small in count(2, {"num_microbatches": microbatches}):
        assert num_bytes == {"all_reduce": FLOAT * WIDE.num_parameters}
        assert calls == {"all_reduce": 1}
        assert small["all_reduce"] <= 3  # which gradients exist, logged values


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("sharding", ["zero1", "zero2"])
def test_zero_1_and_2_scatter_once_and_gather_once(sharding: str, microbatches: int) -> None:
    strategy = {"sharding": sharding, "num_microbatches": microbatches}
    for calls, num_bytes, _ in count(2, strategy):
        assert calls == {"reduce_scatter_single": 1, "all_gather_single": 1}
        assert set(num_bytes.values()) == {FLOAT * WIDE.num_parameters}


@pytest.mark.parametrize("microbatches", [1, 3])
def test_zero3_gathers_each_unit_for_each_pass(microbatches: int) -> None:
    """Forward and backward of each micro-batch gather every unit; every backward scatters its gradient (arXiv:1910.02054)."""
    for _, num_bytes, _ in count(2, {"sharding": "zero3", "num_microbatches": microbatches}):
        norm = FLOAT * HIDDEN  # the last norm is a unit small enough to be counted apart
        weights = FLOAT * WIDE.num_parameters - norm
        assert num_bytes["all_gather_single"] == 2 * microbatches * weights
        assert num_bytes["reduce_scatter_single"] == microbatches * weights


def test_accumulated_batches_reduce_once() -> None:
    case = {"trainer": {"accumulate_grad_batches": 3}}
    for strategy in ({}, {"sharding": "zero2"}):
        case_steps = Case(strategy=strategy, shape=WIDE, batch_size=ROWS, rows=96, steps=2, **case)
        for steps in run_ranks(count_here, 2, case_steps, process_group=False):
            reductions = [sum(calls.values()) for calls, _, _ in steps]
            gathers = [calls.get("all_gather_single", 0) for calls, _, _ in steps]
            assert [total - gathered for total, gathered in zip(reductions, gathers, strict=True)] == [0, 0, 1] * 2


@pytest.mark.parametrize("microbatches", [1, 4])
def test_tensor_parallel_reduces_twice_a_block_each_way(microbatches: int) -> None:
    activation = FLOAT * ROWS * SEQUENCE * HIDDEN
    for calls, num_bytes, _ in count(2, {"tensor_parallel_size": 2, "num_microbatches": microbatches}):
        blocks = 4 * LAYERS  # attention and MLP, forward and backward
        ends = 2  # the embedding forward, the head backward
        assert calls["tensor_all_reduce"] == microbatches * (blocks + ends)
        assert num_bytes["tensor_all_reduce"] == (blocks + ends) * activation
        assert "tensor_all_gather" not in calls  # the logits are never gathered


def test_sequence_parallel_moves_the_same_bytes_in_two_halves() -> None:
    """Each all-reduce becomes a reduce-scatter and an all-gather (arXiv:2205.05198, section 4.2.2)."""
    activation = FLOAT * ROWS * SEQUENCE * HIDDEN
    points = 4 * LAYERS + 2
    for calls, num_bytes, _ in count(2, {"tensor_parallel_size": 2, "sequence_parallel": True}):
        assert calls["tensor_all_gather"] == calls["tensor_reduce_scatter"] == points
        assert num_bytes["tensor_all_gather"] == points * activation // 2  # a rank brings its half
        assert num_bytes["tensor_reduce_scatter"] == points * activation
        assert calls.get("tensor_all_reduce", 0) <= 1  # nothing but the loss's sums


@pytest.mark.parametrize(("schedule", "stages"), [("GPipe", 2), ("1F1B", 2), ("Interleaved1F1B", 4), ("ZBVZeroBubble", 4)])
def test_a_pipeline_sends_each_boundary_once_each_way(schedule: str, stages: int) -> None:
    microbatches = 4
    activation = FLOAT * ROWS * SEQUENCE * HIDDEN
    strategy = {"pipeline_parallel_size": 2, "num_microbatches": microbatches, "schedule": schedule}
    ranks = count(2, strategy)
    boundaries = stages - 1 if schedule != "ZBVZeroBubble" else stages - 2  # the turn of the V stays on its rank
    assert sum(calls["isend"] for calls, _, _ in ranks) == 2 * boundaries * microbatches
    assert sum(num_bytes["isend"] for _, num_bytes, _ in ranks) == 2 * boundaries * activation
    for calls, _, _ in ranks:
        assert set(calls) == {"isend"}


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("checkpoint", ["none", "full"])
def test_context_parallel_gathers_keys_and_values_for_each_pass(microbatches: int, checkpoint: str) -> None:
    """Keys and values twice, their gradients once (arXiv:2407.21783, section 3.3.2); of the loss one number a micro-batch."""
    strategy = {"context_parallel_size": 2, "num_microbatches": microbatches, "activation_checkpoint": checkpoint}
    keys_and_values = FLOAT * 2 * ROWS * SEQUENCE * WIDE.kv_heads * WIDE.head_size
    for calls, num_bytes, _ in count(2, strategy):
        assert calls["tensor_all_gather"] == 2 * LAYERS * microbatches
        assert num_bytes["tensor_all_gather"] == 2 * LAYERS * keys_and_values // 2  # a rank brings its half
        assert calls["tensor_reduce_scatter"] == LAYERS * microbatches
        assert num_bytes["tensor_reduce_scatter"] == LAYERS * keys_and_values
        assert (calls["all_reduce"], num_bytes["all_reduce"]) == (1, FLOAT * WIDE.num_parameters)
        assert set(calls) == {"tensor_all_gather", "tensor_reduce_scatter", "all_reduce"}
