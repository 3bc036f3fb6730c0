"""A schedule table: what each pipeline rank does, in order. Pure data, played by the engine and simulated by the planner."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

FORWARD, BACKWARD, INPUT, WEIGHT = "F", "B", "I", "W"
"""Passes as torch writes them: forward, full backward, gradient of the input only, gradient of the weights only."""

_CELL = re.compile(r"^(\d+)([FBIW])(\d+)$")


@dataclass(frozen=True, order=True)
class Cell:
    """One pass of one stage over one micro-batch, written `1F0` (stage, pass, micro-batch) as torch does.

    >>> str(Cell.parse("3B12")), Cell(0, "F", 2)
    ('3B12', Cell(stage=0, kind='F', micro_batch=2))
    """

    stage: int
    kind: str
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"

    @staticmethod
    def parse(text: str) -> Cell:
        found = _CELL.match(text.strip())
        if found is None:
            raise ValueError(f"{text!r} is no cell: expected <stage><F|B|I|W><micro-batch>, e.g. 1F0")
        return Cell(int(found[1]), found[2], int(found[3]))


@dataclass(frozen=True)
class ScheduleTable:
    """`ranks[r]` lists the cells of pipeline rank `r` in the order it plays them; `stage_ranks[s]` is the rank of stage `s`."""

    schedule: str
    num_stages: int
    num_microbatches: int
    ranks: tuple[tuple[Cell, ...], ...]
    stage_ranks: tuple[int, ...]

    @cached_property
    def last_stage_rank(self) -> int:
        return self.stage_ranks[-1]

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that pipeline rank `rank` holds, ascending."""
        return tuple(stage for stage, owner in enumerate(self.stage_ranks) if owner == rank)

    def last_backwards(self, rank: int) -> frozenset[tuple[int, int]]:
        """Stage and micro-batch of the pass that completes the weights' gradients of each stage of pipeline rank `rank`."""
        return frozenset({cell.stage: (cell.stage, cell.micro_batch) for cell in self.ranks[rank] if cell.kind in "BW"}.values())

    def forward_only(self) -> ScheduleTable:
        """The same table with the backward passes left out: what validation, test and predict play."""
        ranks = tuple(tuple(cell for cell in cells if cell.kind == FORWARD) for cells in self.ranks)
        return ScheduleTable(self.schedule, self.num_stages, self.num_microbatches, ranks, self.stage_ranks)
