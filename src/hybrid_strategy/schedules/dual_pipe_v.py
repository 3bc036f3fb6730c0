"""`DualPipeV`: two stages a rank placed as a V, forward of one micro-batch beside backward of another (arXiv:2412.19437)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from hybrid_strategy.schedules._common import Sizes, Slot, VSchedule, v_streams
from hybrid_strategy.spec.table import INPUT, WEIGHT, Cell


@dataclass(frozen=True)
class DualPipeV(VSchedule):
    """The V of DeepSeek's DualPipe: whole backward passes in the middle, split ones only where they fill a gap.

    Its middle pairs a forward with a backward pass of the other leg, so that the messages of one can hide behind the other.
    Without that gain, as in the stated bubble, it idles as much as ZBVZeroBubble and holds one activation more.

    >>> " ".join(map(str, PART.build(2, 2, 4).ranks[1]))
    '1F0 2F0 1F1 2F1 1F2 2B0 2F2 1B0 1F3 2B1 2F3 1B1 2B2 1B2 2I3 1I3 2W3 1W3'
    """

    name: str = "DualPipeV"
    default_stages_per_rank: int = 2
    uses_weight_pass: bool = True

    def playable_count(self, pipeline_size: int, num_microbatches: int) -> int:
        """2 p or more: one micro-batch for every stage."""
        return max(num_microbatches, 2 * pipeline_size)

    def order(self, rank: int, sizes: Sizes) -> Iterator[Cell]:
        """The passes of `_pattern`; `W` takes the weight pass that has waited longest."""
        streams, waiting = v_streams(rank, sizes), deque[Slot]()
        for name in _pattern(rank, sizes):
            slot = waiting.popleft() if name == WEIGHT else next(streams[name])
            if name[0] == INPUT:
                waiting.append(slot)
            yield Cell(slot[0], name[0], slot[1])

    def bubble_fraction(self, pipeline_size: int, stages_per_rank: int, num_microbatches: int) -> float:
        """(p-1)/(6 m+p-1) for m >= 2 p, found by playing the tables: arXiv:2412.19437 states it for overlapped pairs only.

        For fewer micro-batches the table is played.

        >>> PART.bubble_fraction(4, 2, 8)
        0.058823529411764705
        """
        if num_microbatches < 2 * pipeline_size:
            return super().bubble_fraction(pipeline_size, stages_per_rank, num_microbatches)
        return (pipeline_size - 1) / (6 * num_microbatches + pipeline_size - 1)

    def max_in_flight(self, rank: int, pipeline_size: int, stages_per_rank: int, num_microbatches: int) -> int:
        """2 p + 1 for m >= 2 p; for fewer micro-batches the cells are counted."""
        if pipeline_size == 1 or num_microbatches < 2 * pipeline_size:
            return super().max_in_flight(rank, pipeline_size, stages_per_rank, num_microbatches)
        return 2 * pipeline_size + 1


def _pattern(rank: int, sizes: Sizes) -> Iterator[str]:
    """Passes in order: pass and leg, 0 down and 1 up."""
    ahead, behind = rank + 1, sizes.pipeline_size - 1 - rank
    yield from ["F0"] * (2 * behind)
    yield from ["F0", "F1"] * ahead
    yield from ["I1", "W", "F1"] * behind
    yield from ["F0", "B1", "F1", "B0"] * (sizes.num_microbatches - 2 * sizes.pipeline_size + ahead)
    yield from ["B1", "F1", "B0"] * behind
    for number in range(2 * ahead):
        yield ("B" if number < ahead else "I") + ("0" if number % 2 else "1")
    yield from ["W", "I0"] * behind
    yield from ["W"] * ahead


PART = DualPipeV()
