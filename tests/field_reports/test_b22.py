"""B22, kind of fault: a count that does not fill the schedule hangs it.

Fewer micro-batches than stages, counts that a schedule cannot place, a single sample in evaluation: each runs and is right, or is
refused before any process, with what would do.
"""

from __future__ import annotations

import os
import time
from functools import cache, partial
from typing import Any

import lightning.pytorch as pl
import pytest
from torch.utils.data import DataLoader

from hybrid_strategy import HybridParallelStrategy
from hybrid_strategy.errors import LayoutError
from hybrid_strategy.planning.layouts import check_layout, find_schedule
from hybrid_strategy.registry import parts
from hybrid_strategy.spec.batch import BatchSpec
from hybrid_strategy.spec.layout import Layout
from tests.support.gate import gate
from tests.support.ranks import run_ranks
from tests.support.stacks import Blocks, Rows

SCHEDULES = sorted(parts("schedules"))


def _is_refused(schedule: str, stages: int, num_microbatches: int) -> bool:
    part = find_schedule(schedule)
    layout = Layout(pipeline_parallel_size=stages, schedule=part.name, stages_per_rank=part.default_stages_per_rank)
    try:
        check_layout(layout, batch=BatchSpec(8, num_microbatches))
    except LayoutError:
        return True
    return False


@pytest.mark.parametrize("num_microbatches", [1, 2, 3, 5])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_two_ranks_with_any_number_of_micro_batches(schedule: str, num_microbatches: int) -> None:
    if _is_refused(schedule, 2, num_microbatches):
        return
    strategy = {"pipeline_parallel_size": 2, "num_microbatches": num_microbatches, "schedule": schedule}
    report = gate(Blocks, DataLoader(Rows([3] * 16), batch_size=8), strategy)
    assert report.same, str(report)


@pytest.mark.parametrize("num_microbatches", [1, 3])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_four_ranks_with_fewer_micro_batches_than_stages(schedule: str, num_microbatches: int) -> None:
    if _is_refused(schedule, 4, num_microbatches):
        return
    strategy = {"pipeline_parallel_size": 4, "num_microbatches": num_microbatches, "schedule": schedule}
    report = gate(partial(Blocks, 8), DataLoader(Rows([3] * 16), batch_size=8), strategy, devices=4)
    assert report.same, str(report)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_batch_of_one_row_in_the_middle_of_an_epoch(schedule: str) -> None:
    strategy = {"pipeline_parallel_size": 2, "num_microbatches": 4, "schedule": schedule}
    report = gate(Blocks, DataLoader(Rows([3] * 9), batch_size=8), strategy, steps=3)
    assert report.same, str(report)


def _validate(schedule: str, rows: int, batch_size: int) -> tuple[float, float]:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    world = int(os.environ["WORLD_SIZE"])
    strategy = HybridParallelStrategy(pipeline_parallel_size=world, num_microbatches=4, schedule=schedule)
    pl.seed_everything(3, verbose=False)
    started = time.monotonic()
    trainer = pl.Trainer(accelerator="cpu", devices=world, strategy=strategy, **quiet)
    found = trainer.validate(Blocks(8), DataLoader(Rows([3] * rows), batch_size=batch_size), verbose=False)
    return found[0]["val_loss"], time.monotonic() - started


@cache
def _of_one_process(rows: int, batch_size: int) -> float:
    return float(run_ranks(_validate, 1, "1F1B", rows, batch_size, process_group=False)[0][0])


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("rows", "batch_size"), [(1, 1), (5, 2)])
def test_evaluation_of_fewer_rows_than_stages(schedule: str, rows: int, batch_size: int) -> None:
    want = _of_one_process(rows, batch_size)
    for loss, seconds in run_ranks(_validate, 4, schedule, rows, batch_size, process_group=False):
        assert loss == pytest.approx(want, rel=1e-6)
        assert seconds < 20


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_refusal_names_the_count_and_what_to_set(schedule: str, stages: int) -> None:
    part = find_schedule(schedule)
    layout = Layout(pipeline_parallel_size=stages, schedule=part.name, stages_per_rank=part.default_stages_per_rank)
    for num_microbatches in range(1, 6):
        if _is_refused(schedule, stages, num_microbatches):
            with pytest.raises(LayoutError, match=rf"num_microbatches is {num_microbatches}: .*Set "):
                check_layout(layout, batch=BatchSpec(8, num_microbatches))


@pytest.mark.parametrize("value", [0, -1, 2.5, True])
def test_counts_that_are_none_are_refused_at_once(value: Any) -> None:
    with pytest.raises(LayoutError, match="num_microbatches is "):
        HybridParallelStrategy(pipeline_parallel_size=2, num_microbatches=value)
