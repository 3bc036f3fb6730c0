"""`ZBVZeroBubble`: two stages a rank placed as a V, backward split, no bubble in the middle (arXiv:2401.10241, section 6)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hybrid_strategy.schedules._common import Sizes, VSchedule, v_streams, weave
from hybrid_strategy.spec.table import Cell


@dataclass(frozen=True)
class ZBVZeroBubble(VSchedule):
    """The least bubble for the memory of 1F1B: each rank idles only before its first pass and after its last.

    >>> " ".join(map(str, PART.build(2, 2, 3).ranks[1]))
    '1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2'
    """

    name: str = "ZBVZeroBubble"
    default_stages_per_rank: int = 2
    uses_weight_pass: bool = True

    def playable_count(self, pipeline_size: int, num_microbatches: int) -> int:
        """2 p - 1 or more: what rank 0 sends into the V before the first gradient comes back."""
        return max(num_microbatches, 2 * pipeline_size - 1)

    def order(self, rank: int, sizes: Sizes) -> Iterator[Cell]:
        """The passes of `_pattern`, each micro-batch in its turn."""
        return weave(_pattern(rank, sizes), v_streams(rank, sizes))

    def bubble_fraction(self, pipeline_size: int, stages_per_rank: int, num_microbatches: int) -> float:
        """e/(6 m+e) with e = max(p-1, 4 (p-1) - 2 (m-1)), found by playing the tables; e = p-1 for m >= 2 p - 2.

        arXiv:2401.10241 counts the span of each rank alone, in which nothing is idle for m >= 2 p - 2.

        >>> PART.bubble_fraction(4, 2, 8), PART.bubble_fraction(1, 1, 1)
        (0.058823529411764705, 0.0)
        """
        idle = max(pipeline_size - 1, 4 * (pipeline_size - 1) - 2 * (num_microbatches - 1))
        return idle / (6 * num_microbatches + idle)

    def max_in_flight(self, rank: int, pipeline_size: int, stages_per_rank: int, num_microbatches: int) -> int:
        """min(2 p, 2 m, m+1+rank): never more than 1F1B over twice as many stages holds on its first rank."""
        if pipeline_size == 1:
            return stages_per_rank
        return min(2 * pipeline_size, 2 * num_microbatches, num_microbatches + 1 + rank)


def _pattern(rank: int, sizes: Sizes) -> Iterator[str]:
    """Passes in order: pass and leg, 0 down and 1 up."""
    behind, total = sizes.pipeline_size - rank, sizes.num_microbatches
    yield from ["F0"] * (2 * behind - 1)
    yield from ["F1", "F0"] * rank
    yield from ["F1", "I1", "W1"] * behind
    yield from ["F0", "I0", "W0", "F1", "I1", "W1"] * (total - 2 * behind + 1 - rank)
    yield from ["I0", "W0", "F1", "I1", "W1"] * (behind - 1)
    yield from ["I0", "I1"] * rank
    yield from ["I0", "W0"] * behind
    yield from ["W1"] * rank + ["W0"] * rank


PART = ZBVZeroBubble()
