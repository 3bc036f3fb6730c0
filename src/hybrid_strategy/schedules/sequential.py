"""`sequential`: one micro-batch at a time goes forward through all stages and back, so one rank works at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hybrid_strategy.schedules._common import ScheduleBase, Sizes
from hybrid_strategy.spec.table import BACKWARD, FORWARD, Cell


@dataclass(frozen=True)
class Sequential(ScheduleBase):
    """A naive layer split: saves memory, never time. A baseline to measure the others against.

    >>> [str(cell) for cell in PART.build(2, 1, 2).ranks[0]]
    ['0F0', '0B0', '0F1', '0B1']
    """

    name: str = "sequential"

    def order(self, rank: int, sizes: Sizes) -> Iterator[Cell]:
        """F0 B0 F1 B1 ... on every rank."""
        for micro_batch in range(sizes.num_microbatches):
            yield Cell(rank, FORWARD, micro_batch)
            yield Cell(rank, BACKWARD, micro_batch)

    def bubble_fraction(self, pipeline_size: int, stages_per_rank: int, num_microbatches: int) -> float:
        """(p-1)/p: one of p ranks works at any time.

        >>> PART.bubble_fraction(4, 1, 8)
        0.75
        """
        return (pipeline_size - 1) / pipeline_size

    def max_in_flight(self, rank: int, pipeline_size: int, stages_per_rank: int, num_microbatches: int) -> int:
        """One micro-batch."""
        return stages_per_rank


PART = Sequential()
