"""A schedule table in a file: torch's compute-only CSV, one line a rank, cells such as `1F0` between commas."""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from pathlib import Path

from hybrid_strategy.errors import LayoutError, message
from hybrid_strategy.planning.verify import verify_table
from hybrid_strategy.spec.play import peak_in_flight, unit_bubble_fraction
from hybrid_strategy.spec.schedule import Refusal
from hybrid_strategy.spec.table import Cell, ScheduleTable

SUFFIX = ".csv"
_OVERLAPPED = re.compile(r"^\((.+)\)OVERLAP_F_B$")
_ADVICE = "Set a file with one line a rank and cells such as 1F0, 0B3 between commas (torch's compute-only CSV)"


def write_table(table: ScheduleTable, path: str | Path) -> None:
    """Write `table` so that `read_table` and torch read it."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(table.ranks)


def read_table(path: str | Path) -> ScheduleTable:
    """The table in a file, verified. A cell may be empty (a bubble) or `(0F4;7B1)OVERLAP_F_B`: played one after the other.

    Raises:
        LayoutError: no such file, a cell that is none, or a table that is not right.
    """
    try:
        with open(path, newline="", encoding="utf-8") as file:
            rows = [tuple(chain.from_iterable(map(_cells, row))) for row in csv.reader(file)]
    except (OSError, ValueError) as error:
        raise LayoutError(message("schedule", str(path), "the file has no schedule table", str(error), _ADVICE)) from error
    table = _place(str(path), rows)
    verify_table(table)
    return table


def _cells(text: str) -> Sequence[Cell]:
    overlapped = _OVERLAPPED.match(text.strip())
    parts = overlapped[1].split(";") if overlapped else [text]
    return [Cell.parse(part) for part in parts if part.strip()]


def _place(name: str, rows: Sequence[tuple[Cell, ...]]) -> ScheduleTable:
    """Infer from the cells where each stage stands, and how many stages and micro-batches there are."""
    ranks = {cell.stage: rank for rank in reversed(range(len(rows))) for cell in rows[rank]}
    missing = sorted(set(range(max(ranks, default=0) + 1)) - set(ranks))
    held = {list(ranks.values()).count(rank) for rank in range(len(rows))}
    if missing or len(held) != 1:
        rule = "every stage must have cells, and every rank as many stages as the others"
        numbers = f"stages without a cell: {missing or 'none'}; stages a rank: {sorted(held)}"
        raise LayoutError(message("schedule", name, rule, numbers, _ADVICE))
    batches = 1 + max(cell.micro_batch for row in rows for cell in row)
    return ScheduleTable(name, len(ranks), batches, tuple(rows), tuple(ranks[stage] for stage in range(len(ranks))))


@dataclass(frozen=True)
class FileSchedule:
    """The table of a file as a schedule.

    For fewer micro-batches than the file has, the others are left out; for more, its order is played again from the start.
    """

    table: ScheduleTable

    @property
    def name(self) -> str:
        return self.table.schedule

    @property
    def default_stages_per_rank(self) -> int:
        return self.table.num_stages // len(self.table.ranks)

    @property
    def uses_weight_pass(self) -> bool:
        """Does some cell split the backward pass?"""
        return any(cell.kind == "W" for cells in self.table.ranks for cell in cells)

    def refuse(self, pipeline_size: int, stages_per_rank: int, num_microbatches: int) -> Refusal | None:
        """A file is for one number of ranks and of stages."""
        ranks, stages = len(self.table.ranks), self.default_stages_per_rank
        if (pipeline_size, stages_per_rank) == (ranks, stages):
            return None
        rule = f"the table in the file is for {ranks} ranks with {stages} stage{'s' if stages > 1 else ''} each"
        numbers = f"pipeline_parallel_size is {pipeline_size} and stages_per_rank {stages_per_rank}"
        advice = f"Set pipeline_parallel_size={ranks} and stages_per_rank={stages}"
        return "schedule", self.name, rule, numbers, advice

    def stage_ranks(self, pipeline_size: int, stages_per_rank: int) -> tuple[int, ...]:
        """As in the file."""
        return self.table.stage_ranks

    def build(self, pipeline_size: int, stages_per_rank: int, num_microbatches: int) -> ScheduleTable:
        """The file's order, cut or repeated to the number of micro-batches."""
        sizes = (pipeline_size, stages_per_rank, num_microbatches)
        ranks = tuple(self.rank_order(rank, *sizes) for rank in range(len(self.table.ranks)))
        return ScheduleTable(self.name, self.table.num_stages, num_microbatches, ranks, self.table.stage_ranks)

    def rank_order(self, rank: int, pipeline_size: int, stages_per_rank: int, num_microbatches: int) -> tuple[Cell, ...]:
        """The row of `rank` in that table."""
        return _repeat(self.table.ranks[rank], self.table.num_microbatches, num_microbatches)

    def bubble_fraction(self, pipeline_size: int, stages_per_rank: int, num_microbatches: int) -> float:
        """By playing the table with F=1, B=2, I=1, W=1."""
        return unit_bubble_fraction(self.build(pipeline_size, stages_per_rank, num_microbatches))

    def max_in_flight(self, rank: int, pipeline_size: int, stages_per_rank: int, num_microbatches: int) -> int:
        """By walking through the cells of `rank`."""
        return peak_in_flight(self.rank_order(rank, pipeline_size, stages_per_rank, num_microbatches))


def _repeat(cells: Sequence[Cell], period: int, num_microbatches: int) -> tuple[Cell, ...]:
    """`cells` again and again with micro-batches moved up by `period`, without those that are not there."""
    moved = (
        Cell(cell.stage, cell.kind, cell.micro_batch + first) for first in range(0, num_microbatches, period) for cell in cells
    )
    return tuple(cell for cell in moved if cell.micro_batch < num_microbatches)


@lru_cache(maxsize=16)
def file_schedule(path: str) -> FileSchedule:
    """The schedule in the file `path`, read once a process."""
    return FileSchedule(read_table(path))
