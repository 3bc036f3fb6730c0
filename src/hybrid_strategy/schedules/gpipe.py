"""`GPipe`: all forward passes, then all backward passes (arXiv:1811.06965)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hybrid_strategy.schedules._common import ScheduleBase, Sizes
from hybrid_strategy.spec.table import BACKWARD, FORWARD, Cell


@dataclass(frozen=True)
class GPipe(ScheduleBase):
    """The simplest pipeline. It holds the activations of every micro-batch.

    >>> [str(cell) for cell in PART.build(2, 1, 2).ranks[1]]
    ['1F0', '1F1', '1B0', '1B1']
    """

    name: str = "GPipe"

    def order(self, rank: int, sizes: Sizes) -> Iterator[Cell]:
        """F0 F1 ... B0 B1 ..."""
        for kind in (FORWARD, BACKWARD):
            for micro_batch in range(sizes.num_microbatches):
                yield Cell(rank, kind, micro_batch)

    def bubble_fraction(self, pipeline_size: int, stages_per_rank: int, num_microbatches: int) -> float:
        """(p-1)/(m+p-1), for any m (arXiv:1811.06965, section 2.3).

        >>> PART.bubble_fraction(4, 1, 9)
        0.25
        """
        return (pipeline_size - 1) / (num_microbatches + pipeline_size - 1)

    def max_in_flight(self, rank: int, pipeline_size: int, stages_per_rank: int, num_microbatches: int) -> int:
        """Every micro-batch; one where there is no pipeline."""
        return num_microbatches if pipeline_size > 1 else stages_per_rank


PART = GPipe()
