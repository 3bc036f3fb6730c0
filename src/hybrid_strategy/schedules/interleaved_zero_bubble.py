"""`InterleavedZeroBubble`: Interleaved1F1B with the backward pass split, weight passes filling the gaps (arXiv:2401.10241)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hybrid_strategy.schedules._common import LoopedSchedule, Sizes, looped_slots, round_up, weave
from hybrid_strategy.spec.table import Cell


@dataclass(frozen=True)
class InterleavedZeroBubble(LoopedSchedule):
    """A third of the bubble of Interleaved1F1B, for the activations of `stages_per_rank x pipeline_size` on every rank.

    >>> " ".join(map(str, PART.build(2, 2, 2).ranks[1]))
    '1F0 1F1 3F0 3I0 3F1 3I1 3W0 1I0 3W1 1I1 1W0 1W1'
    """

    name: str = "InterleavedZeroBubble"
    default_stages_per_rank: int = 2
    uses_weight_pass: bool = True

    def playable_count(self, pipeline_size: int, num_microbatches: int) -> int:
        """Whole rounds, as for Interleaved1F1B."""
        return round_up(num_microbatches, pipeline_size)

    def order(self, rank: int, sizes: Sizes) -> Iterator[Cell]:
        """F warm-up, then F I in turn, then I; each rank lets its weight passes follow `rank` input passes behind."""
        streams = {kind: looped_slots(rank, sizes, kind != "F") for kind in "FIW"}
        return weave(_pattern(rank, sizes), streams)

    def bubble_fraction(self, pipeline_size: int, stages_per_rank: int, num_microbatches: int) -> float:
        """(p-1)/(3 v m+p-1) for m a multiple of p (arXiv:2401.10241, ZB-H1: (p-1)(T_F+T_B-T_W) idle, all three 1).

        For any other m the table is played.

        >>> PART.bubble_fraction(4, 3, 4)
        0.07692307692307693
        """
        if num_microbatches % pipeline_size:
            return super().bubble_fraction(pipeline_size, stages_per_rank, num_microbatches)
        return (pipeline_size - 1) / (3 * stages_per_rank * num_microbatches + pipeline_size - 1)

    def max_in_flight(self, rank: int, pipeline_size: int, stages_per_rank: int, num_microbatches: int) -> int:
        """v p for m a multiple of p: what the ranks at the end save in warm-up they spend on waiting weight passes."""
        if pipeline_size == 1:
            return stages_per_rank
        if num_microbatches % pipeline_size:
            return super().max_in_flight(rank, pipeline_size, stages_per_rank, num_microbatches)
        return stages_per_rank * pipeline_size


def _pattern(rank: int, sizes: Sizes) -> Iterator[str]:
    """The kinds of the passes of `rank` in order.

    >>> "".join(_pattern(1, Sizes(2, 2, 2)))
    'FFFIFIWIWIWW'
    """
    total = sizes.stages_per_rank * sizes.num_microbatches
    warmup = min((sizes.stages_per_rank - 1) * sizes.pipeline_size + sizes.pipeline_size - 1 - rank, total)
    yield from "F" * warmup
    for backward in range(total):
        if warmup + backward < total:
            yield "F"
        yield "I"
        if backward >= rank:
            yield "W"
    yield from "W" * min(rank, total)


PART = InterleavedZeroBubble()
