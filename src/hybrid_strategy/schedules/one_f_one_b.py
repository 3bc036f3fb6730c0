"""`1F1B`: after a warm-up one forward, one backward, so that few activations are held (arXiv:1806.03377, arXiv:2104.04473)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hybrid_strategy.schedules._common import ScheduleBase, Sizes, weave
from hybrid_strategy.spec.table import Cell


@dataclass(frozen=True)
class OneForwardOneBackward(ScheduleBase):
    """The time of GPipe, with the activations of at most `pipeline_size - rank` micro-batches.

    >>> [str(cell) for cell in PART.build(2, 1, 3).ranks[0]]
    ['0F0', '0F1', '0B0', '0F2', '0B1', '0B2']
    """

    name: str = "1F1B"

    def order(self, rank: int, sizes: Sizes) -> Iterator[Cell]:
        """F once for every rank behind this one, then F B in turn, then the rest of the backward passes."""
        total = sizes.num_microbatches
        warmup = min(sizes.pipeline_size - 1 - rank, total)
        pattern = "F" * warmup + "FB" * (total - warmup) + "B" * warmup
        return weave(pattern, {kind: ((rank, each) for each in range(total)) for kind in "FB"})

    def bubble_fraction(self, pipeline_size: int, stages_per_rank: int, num_microbatches: int) -> float:
        """(p-1)/(m+p-1), for any m (arXiv:2104.04473, section 2.2.1, as a share of the whole step).

        >>> PART.bubble_fraction(2, 1, 3)
        0.25
        """
        return (pipeline_size - 1) / (num_microbatches + pipeline_size - 1)

    def max_in_flight(self, rank: int, pipeline_size: int, stages_per_rank: int, num_microbatches: int) -> int:
        """min(m, p - rank): the warm-up and one more; one micro-batch where there is no pipeline."""
        return min(num_microbatches, pipeline_size - rank) if pipeline_size > 1 else stages_per_rank


PART = OneForwardOneBackward()
