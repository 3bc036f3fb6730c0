"""Every schedule that the registry finds: right tables for every size, and figures equal to what the table does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from hybrid_strategy import registry
from hybrid_strategy.errors import message
from hybrid_strategy.planning.simulate import simulate
from hybrid_strategy.planning.verify import verify_table

PARTS = registry.parts("schedules")
COUNTS = [1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 17]


def sizes(schedule: Any) -> Iterator[tuple[int, int, int]]:
    for pipeline_size in (1, 2, 3, 4, 6, 8):
        for stages_per_rank in (1, 2, 3):
            for num_microbatches in COUNTS:
                if schedule.refuse(pipeline_size, stages_per_rank, num_microbatches) is None:
                    yield pipeline_size, stages_per_rank, num_microbatches


@pytest.fixture(params=list(PARTS.values()), ids=list(PARTS))
def schedule(request: pytest.FixtureRequest) -> Any:
    return request.param


def test_the_schedules_of_torch_are_there() -> None:
    looped = {"Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble"}
    assert {"sequential", "GPipe", "1F1B", "ZBVZeroBubble", "DualPipeV"} | looped <= set(PARTS)


def test_every_table_is_right(schedule: Any) -> None:
    for p, v, m in sizes(schedule):
        table = schedule.build(p, v, m)
        assert (table.schedule, table.num_stages, table.num_microbatches) == (schedule.name, p * v, m)
        assert (len(table.ranks), table.stage_ranks) == (p, schedule.stage_ranks(p, v))
        verify_table(table)
        verify_table(table.forward_only(), forward_only=True)


def test_bubble_equals_the_simulation(schedule: Any) -> None:
    for p, v, m in sizes(schedule):
        played = simulate(schedule.build(p, v, m)).bubble_fraction
        assert schedule.bubble_fraction(p, v, m) == pytest.approx(played, abs=1e-12), (p, v, m)


def test_in_flight_equals_the_simulation(schedule: Any) -> None:
    for p, v, m in sizes(schedule):
        stated = tuple(schedule.max_in_flight(rank, p, v, m) for rank in range(p))
        assert stated == simulate(schedule.build(p, v, m)).peak_in_flight, (p, v, m)


def test_an_uneven_last_batch_holds_no_more_than_a_full_one(schedule: Any) -> None:
    stages = schedule.default_stages_per_rank
    for p in (2, 4, 8):
        for rank in range(p):
            held = [schedule.max_in_flight(rank, p, stages, m) for m in range(1, 20)]
            assert held == sorted(held), (p, rank)


def test_no_schedule_is_slower_than_one_micro_batch_at_a_time(schedule: Any) -> None:
    for p, v, m in sizes(schedule):
        makespan = simulate(schedule.build(p, v, m)).makespan_seconds
        assert 3 * v * m <= makespan <= 3 * p * v * m


def test_weight_passes_are_declared(schedule: Any) -> None:
    v = schedule.default_stages_per_rank
    assert schedule.refuse(4, v, 8) is None, "the default number of stages must be playable"
    kinds = {cell.kind for cells in schedule.build(4, v, 8).ranks for cell in cells}
    assert ("W" in kinds) == schedule.uses_weight_pass


def test_one_rank_goes_back_at_once(schedule: Any) -> None:
    assert schedule.refuse(1, 1, 3) is None
    assert " ".join(map(str, schedule.build(1, 1, 3).ranks[0])) == "0F0 0B0 0F1 0B1 0F2 0B2"
    assert schedule.bubble_fraction(1, 1, 3) == 0


def test_any_number_of_micro_batches_is_allowed(schedule: Any) -> None:
    for m in COUNTS:
        assert schedule.refuse(4, schedule.default_stages_per_rank, m) is None


def test_refusals_have_the_shape_of_every_message(schedule: Any) -> None:
    wrong = 2 if schedule.default_stages_per_rank == 1 else 1
    refusal = schedule.refuse(4, wrong, 8)
    assert refusal is not None
    assert refusal[0] == "stages_per_rank"
    assert message(*refusal).startswith(f"stages_per_rank is {wrong}: the schedule {schedule.name} ")


def test_more_stages_do_not_make_the_bubble_larger() -> None:
    single, looped = PARTS["1F1B"], PARTS["Interleaved1F1B"]
    for m in (4, 8, 12, 16):
        bubbles = [single.bubble_fraction(4, 1, m), *(looped.bubble_fraction(4, v, m) for v in (2, 3, 4))]
        assert bubbles == sorted(bubbles, reverse=True), m
