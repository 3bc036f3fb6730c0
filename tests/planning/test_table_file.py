from __future__ import annotations

from pathlib import Path

import pytest

from hybrid_strategy import registry
from hybrid_strategy.errors import LayoutError
from hybrid_strategy.planning.layouts import check_layout, find_schedule, resolve_layout
from hybrid_strategy.planning.simulate import simulate
from hybrid_strategy.planning.table_file import FileSchedule, read_table, write_table
from hybrid_strategy.planning.verify import verify_table
from hybrid_strategy.spec.batch import BatchSpec


@pytest.mark.parametrize("name", list(registry.parts("schedules")))
def test_written_and_read_again(name: str, tmp_path: Path) -> None:
    schedule = registry.find("schedules", name, "schedule")
    table = schedule.build(3, schedule.default_stages_per_rank, 5)
    write_table(table, tmp_path / "table.csv")
    again = read_table(tmp_path / "table.csv")
    assert (again.ranks, again.stage_ranks) == (table.ranks, table.stage_ranks)
    assert (again.num_stages, again.num_microbatches) == (table.num_stages, 5)


def test_empty_and_overlapped_cells(tmp_path: Path) -> None:
    path = tmp_path / "overlap.csv"
    path.write_text("0F0,0F1,,,(0F2;0B0)OVERLAP_F_B,0B1,,0B2\n,1F0,1B0,1F1,1B1,1F2,1B2\n")
    assert " ".join(map(str, read_table(path).ranks[0])) == "0F0 0F1 0F2 0B0 0B1 0B2"


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("0F0,0SEND_F0\n1F0\n", "'0SEND_F0' is no cell"),
        ("0F0,0B0\n2F0,2B0\n", "stages without a cell: [1]"),
        ("0F0,1F0,1B0,0B0\n2F0,2B0\n", "stages a rank: [1, 2]"),
        ("", "stages a rank: []"),
        ("0F0,0B0\n1F0,1B0,1B0\n", "cell 1B0, number 2 of rank 1, comes twice"),
        ("0B0,0F0\n1F0,1B0\n", "cell 0B0, number 0 of rank 0, comes before its own forward pass"),
        ("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n", "cell 0B0 of rank 0 can never run"),
        ("0F0,0B0\n1F0\n", "stage 1 does F over micro-batch 0"),
    ],
)
def test_files_that_are_refused(text: str, part: str, tmp_path: Path) -> None:
    (tmp_path / "wrong.csv").write_text(text)
    with pytest.raises(LayoutError) as error:
        read_table(tmp_path / "wrong.csv")
    assert part in str(error.value)
    assert str(error.value).startswith("schedule is '")


def test_no_such_file() -> None:
    with pytest.raises(LayoutError, match="the file has no schedule table"):
        find_schedule("nowhere.csv")


def test_a_file_is_a_schedule(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    one_f_one_b = registry.find("schedules", "1F1B", "schedule")
    write_table(one_f_one_b.build(2, 1, 4), path)
    layout = resolve_layout(world_size=4, pipeline_parallel_size=2, schedule=str(path))
    check_layout(layout, batch=BatchSpec(16, num_microbatches=8))
    schedule = find_schedule(layout.schedule)
    for count in (1, 2, 3, 4, 5, 8, 11):
        table = schedule.build(2, 1, count)
        verify_table(table)
        assert schedule.bubble_fraction(2, 1, count) == simulate(table).bubble_fraction
        assert tuple(schedule.max_in_flight(rank, 2, 1, count) for rank in (0, 1)) == simulate(table).peak_in_flight
    assert schedule.build(2, 1, 3).ranks == one_f_one_b.build(2, 1, 3).ranks


def test_a_file_for_other_sizes_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    write_table(registry.find("schedules", "ZBVZeroBubble", "schedule").build(2, 2, 4), path)
    schedule = find_schedule(str(path))
    assert isinstance(schedule, FileSchedule)
    assert schedule.uses_weight_pass
    assert (schedule.default_stages_per_rank, schedule.stage_ranks(2, 2)) == (2, (0, 1, 1, 0))
    with pytest.raises(
        LayoutError, match=r"is for 2 ranks with 2 stages each.*Set pipeline_parallel_size=2 and stages_per_rank=2"
    ):
        resolve_layout(world_size=4, pipeline_parallel_size=4, schedule=str(path))
