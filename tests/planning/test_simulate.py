from __future__ import annotations

import pytest

from hybrid_strategy import registry
from hybrid_strategy.errors import LayoutError
from hybrid_strategy.planning.simulate import PassCosts, simulate
from hybrid_strategy.spec.table import Cell, ScheduleTable

TABLE = registry.find("schedules", "1F1B", "schedule").build(2, 1, 2)


def test_every_cell_has_its_time() -> None:
    played = simulate(TABLE)
    assert played.makespan_seconds == 9
    assert played.span(Cell(0, "F", 0)) == (0, 1)
    assert played.span(Cell(1, "F", 0)) == (1, 2)
    assert played.span(Cell(1, "B", 0)) == (2, 4)
    assert played.span(Cell(0, "B", 1)) == (7, 9)
    assert played.idle_fractions == pytest.approx((1 / 3, 1 / 3))
    assert played.peak_in_flight == (2, 1)


def test_messages_delay_the_receiver_only() -> None:
    late = simulate(TABLE, PassCosts(default_send_seconds=0.5))
    assert late.span(Cell(0, "F", 1)) == (1, 2)
    assert late.span(Cell(1, "F", 0)) == (1.5, 2.5)
    one_way = simulate(TABLE, PassCosts(send_seconds={(1, 0): 3.0}))
    assert one_way.span(Cell(1, "F", 0)) == (1, 2)
    assert one_way.span(Cell(0, "B", 0)) == (7, 9)


def test_the_slowest_stage_sets_the_pace() -> None:
    table = registry.find("schedules", "1F1B", "schedule").build(2, 1, 64)
    played = simulate(table, PassCosts({0: {"F": 1.0, "B": 2.0}, 1: {"F": 2.0, "B": 4.0}}))
    assert played.makespan_seconds == pytest.approx(64 * 6 + 3)
    assert played.idle_fractions[0] > 0.5 > played.idle_fractions[1]


def test_measured_halves_stand_for_a_whole_backward() -> None:
    costs = PassCosts({0: {"F": 1.0, "I": 1.5, "W": 0.5}, 1: {"F": 1.0}})
    assert costs.cell_seconds(Cell(0, "B", 0)) == 2.0
    assert costs.cell_seconds(Cell(1, "I", 0)) == 1.0


def test_zero_bubble_idles_less_than_1f1b() -> None:
    def bubble(name: str) -> float:
        schedule = registry.find("schedules", name, "schedule")
        return simulate(schedule.build(4, schedule.default_stages_per_rank, 8)).bubble_fraction

    order = ["ZBVZeroBubble", "InterleavedZeroBubble", "Interleaved1F1B", "1F1B", "sequential"]
    assert [bubble(name) for name in order] == sorted(bubble(name) for name in order)
    assert bubble("GPipe") == bubble("1F1B") == 3 / 11


def test_deadlock() -> None:
    rows = (("0F0", "0B0", "0F1", "0B1"), ("1F0", "1F1", "1B0", "1B1"))
    ranks = tuple(tuple(map(Cell.parse, row)) for row in rows)
    with pytest.raises(LayoutError, match="cell 0B0 of rank 0 can never run"):
        simulate(ScheduleTable("mine", 2, 2, ranks, (0, 1)))


def test_nothing_to_play() -> None:
    assert simulate(ScheduleTable("mine", 2, 0, ((), ()), (0, 1))).bubble_fraction == 0
