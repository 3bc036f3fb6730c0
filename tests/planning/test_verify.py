from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid_strategy import registry
from hybrid_strategy.errors import LayoutError
from hybrid_strategy.planning.verify import verify_table
from hybrid_strategy.spec.table import Cell, ScheduleTable


def table(*rows: str, stages: tuple[int, ...] = (0, 1), batches: int = 1) -> ScheduleTable:
    ranks = tuple(tuple(map(Cell.parse, row.split())) for row in rows)
    return ScheduleTable("mine", len(stages), batches, ranks, stages)


@pytest.mark.parametrize(
    ("wrong", "part"),
    [
        (table("0F0 0B0", "1F0 1B0 1F0"), "cell 1F0, number 2 of rank 1, comes twice"),
        (table("0F0 0B0 1F0", "1F0 1B0"), "cell 1F0, number 2 of rank 0, stands on the wrong rank: stage 1 is on rank 1"),
        (table("0F0 0B0", "2F0"), "has a stage that is not there: the stages are 0 to 1"),
        (table("0F0 0B0 0F1", "1F0 1B0"), "has a micro-batch that is not there: the micro-batches are 0 to 0"),
        (table("0F0 0W0", "1F0 1B0"), "cell 0W0, number 1 of rank 0, comes before its own input pass"),
        (table("0F0 0I0 0B0", "1F0 1B0"), "repeats a backward pass that was split into I and W"),
        (table("0F0 0B0 0W0", "1F0 1B0"), "repeats a backward pass that was done whole by B"),
        (table("0F0 0I0", "1F0 1B0"), "stage 0 does FI over micro-batch 0, not F and B, or F, I and W"),
        (table("0F0 0B0", ""), "stage 1 does nothing over micro-batch 0"),
        (table("0B0 0F0", "1F0 1B0"), "comes before its own forward pass"),
        (table("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1", batches=2), "Waiting for ever: rank 0 at 0B0, rank 1 at 1F1"),
        (table("0F0 0B0", "1F0 1B0", stages=(0, 2)), "stage 1 is placed on rank 2, but the ranks are 0 to 1"),
        (replace(table("0F0 0B0", "1F0 1B0"), num_stages=3), "2 stages are placed, not 3"),
        (ScheduleTable("mine", 1, 1, ((Cell(0, "X", 0),),), (0,)), "has a pass that is none of F, B, I and W"),
    ],
)
def test_wrong_tables(wrong: ScheduleTable, part: str) -> None:
    with pytest.raises(LayoutError) as error:
        verify_table(wrong)
    assert part in str(error.value)
    assert str(error.value).startswith("schedule is 'mine': ")


def test_forward_only() -> None:
    whole = table("0F0 0B0", "1F0 1B0")
    verify_table(whole.forward_only(), forward_only=True)
    with pytest.raises(LayoutError, match="stage 0 does FB over micro-batch 0, not F alone"):
        verify_table(whole, forward_only=True)
    with pytest.raises(LayoutError, match="stage 0 does F over micro-batch 0"):
        verify_table(whole.forward_only())


@given(st.sampled_from(sorted(registry.parts("schedules"))), st.integers(1, 4), st.integers(1, 6), st.data())
def test_a_table_with_any_cell_missing_or_doubled_is_refused(name: str, p: int, m: int, data: st.DataObject) -> None:
    schedule = registry.find("schedules", name, "schedule")
    right = schedule.build(p, schedule.default_stages_per_rank if p > 1 else 1, m)
    rank = data.draw(st.integers(0, p - 1))
    cells = list(right.ranks[rank])
    place = data.draw(st.integers(0, len(cells) - 1))
    cell = cells[place]
    for changed in ([*cells[:place], *cells[place + 1 :]], [*cells, cell]):
        ranks = [*right.ranks[:rank], tuple(changed), *right.ranks[rank + 1 :]]
        with pytest.raises(LayoutError):
            verify_table(replace(right, ranks=tuple(ranks)))
