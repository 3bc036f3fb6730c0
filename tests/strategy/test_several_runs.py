"""Several runs in one process: what one leaves behind must not grow with their number."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import run_ranks
from tests.support.training import Case, train_here

LAYOUTS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "zero1": {"sharding": "zero1"},
    "zero3": {"sharding": "zero3"},
    "tp2": {"tensor_parallel_size": 2, "sequence_parallel": True},
    "pp2": {"pipeline_parallel_size": 2, "num_microbatches": 2, "activation_checkpoint": "full"},
    "cp2": {"context_parallel_size": 2},
}


def _threads_of_groups() -> int:
    """Threads that process groups keep for their messages."""
    names = [path.joinpath("comm") for path in Path("/proc/self/task").iterdir()]
    return sum(name.read_text().startswith("gloo") for name in names if name.exists())


def _run(strategy: dict[str, Any]) -> int:
    """Threads that the runs before have left; then one more run."""
    gc.collect()
    found = _threads_of_groups()
    train_here(Case(strategy=strategy, steps=1, trainer={"limit_val_batches": 0}))
    return found


@pytest.mark.parametrize("name", LAYOUTS)
def test_process_groups_of_earlier_runs_are_freed(name: str) -> None:
    found = [run_ranks(_run, 2, LAYOUTS[name], process_group=False) for _ in range(5)]
    for rank in range(2):
        after = [each[rank] for each in found[1:]]
        assert after[-1] <= after[0], after
