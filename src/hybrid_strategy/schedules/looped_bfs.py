"""`LoopedBFS`: several stages a rank, every micro-batch through one stage before the next (arXiv:2211.05953)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hybrid_strategy.schedules._common import LoopedSchedule, Sizes
from hybrid_strategy.spec.table import BACKWARD, FORWARD, Cell


@dataclass(frozen=True)
class LoopedBFS(LoopedSchedule):
    """GPipe over several stages a rank: the bubble of Interleaved1F1B, all activations held, weights gathered once a stage.

    >>> " ".join(map(str, PART.build(2, 2, 2).ranks[0]))
    '0F0 0F1 2F0 2F1 2B1 2B0 0B1 0B0'
    """

    name: str = "LoopedBFS"
    default_stages_per_rank: int = 2

    def order(self, rank: int, sizes: Sizes) -> Iterator[Cell]:
        """Forward stage by stage; backward the same in reverse."""
        stages, batches = range(rank, sizes.num_stages, sizes.pipeline_size), range(sizes.num_microbatches)
        forward = [(stage, each) for stage in stages for each in batches]
        yield from (Cell(stage, FORWARD, each) for stage, each in forward)
        yield from (Cell(stage, BACKWARD, each) for stage, each in reversed(forward))

    def bubble_fraction(self, pipeline_size: int, stages_per_rank: int, num_microbatches: int) -> float:
        """1 - v m/T with T = (v-1) max(m, p) + m + p-1, which is (p-1)/(v m+p-1) for m >= p (as in arXiv:2211.05953).

        Below p micro-batches a rank waits for the first one to come round before it can start its next stage.

        >>> PART.bubble_fraction(4, 3, 4), PART.bubble_fraction(1, 1, 4)
        (0.2, 0.0)
        """
        steps = (stages_per_rank - 1) * max(num_microbatches, pipeline_size) + num_microbatches + pipeline_size - 1
        return (steps - stages_per_rank * num_microbatches) / steps

    def max_in_flight(self, rank: int, pipeline_size: int, stages_per_rank: int, num_microbatches: int) -> int:
        """Every micro-batch at every stage of the rank."""
        return stages_per_rank * num_microbatches if pipeline_size > 1 else stages_per_rank


PART = LoopedBFS()
