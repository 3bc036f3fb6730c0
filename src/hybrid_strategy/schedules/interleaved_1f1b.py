"""`Interleaved1F1B`: several stages a rank, which divides the bubble by their number (arXiv:2104.04473, section 2.2.2)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hybrid_strategy.schedules._common import LoopedSchedule, Sizes, looped_slots, round_up, weave
from hybrid_strategy.spec.table import Cell


@dataclass(frozen=True)
class Interleaved1F1B(LoopedSchedule):
    """1F1B over `stages_per_rank` stages a rank, micro-batches in rounds of `pipeline_size`.

    >>> " ".join(map(str, PART.build(2, 2, 2).ranks[1]))
    '1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1'
    """

    name: str = "Interleaved1F1B"
    default_stages_per_rank: int = 2

    def playable_count(self, pipeline_size: int, num_microbatches: int) -> int:
        """Whole rounds. A short last round plays the order of a whole one without the micro-batches it lacks, so that an uneven
        last batch never holds more activations than a full one."""
        return round_up(num_microbatches, pipeline_size)

    def order(self, rank: int, sizes: Sizes) -> Iterator[Cell]:
        """F through all stages but the last and two more for every rank behind, then F B in turn, then the rest of B."""
        total = sizes.stages_per_rank * sizes.num_microbatches
        warmup = min(_warmup(rank, sizes.pipeline_size, sizes.stages_per_rank), total)
        pattern = "F" * warmup + "FB" * (total - warmup) + "B" * warmup
        return weave(pattern, {"F": looped_slots(rank, sizes, False), "B": looped_slots(rank, sizes, True)})

    def bubble_fraction(self, pipeline_size: int, stages_per_rank: int, num_microbatches: int) -> float:
        """(p-1)/(v m+p-1) for m a multiple of p (arXiv:2104.04473, section 2.2.2, as a share of the whole step).

        For any other m the table is played.

        >>> PART.bubble_fraction(4, 3, 4)
        0.2
        """
        if num_microbatches % pipeline_size:
            return super().bubble_fraction(pipeline_size, stages_per_rank, num_microbatches)
        return (pipeline_size - 1) / (stages_per_rank * num_microbatches + pipeline_size - 1)

    def max_in_flight(self, rank: int, pipeline_size: int, stages_per_rank: int, num_microbatches: int) -> int:
        """min(v m, (v-1) p + 2 (p-1-rank) + 1) for m a multiple of p; for any other m the cells are counted."""
        if pipeline_size == 1:
            return stages_per_rank
        if num_microbatches % pipeline_size:
            return super().max_in_flight(rank, pipeline_size, stages_per_rank, num_microbatches)
        return min(stages_per_rank * num_microbatches, _warmup(rank, pipeline_size, stages_per_rank) + 1)


def _warmup(rank: int, pipeline_size: int, stages_per_rank: int) -> int:
    """Forward passes before the first backward pass may come."""
    return (stages_per_rank - 1) * pipeline_size + 2 * (pipeline_size - 1 - rank)


PART = Interleaved1F1B()
