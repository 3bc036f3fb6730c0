"""A schedule that published rows have and this package has not."""

from __future__ import annotations

from dataclasses import dataclass, field

from hybrid_strategy import registry


@dataclass(frozen=True)
class TwiceTheMemory:
    """ZB-2p (arXiv:2401.10241): twice the activations of 1F1B, next to no bubble. Not one of ours, so described here."""

    name: str = "ZB-2p"
    default_stages_per_rank: int = 1
    uses_weight_pass: bool = True
    base: str = field(default="1F1B", repr=False)

    def stage_ranks(self, pipeline_size: int, stages_per_rank: int) -> tuple[int, ...]:
        return registry.find("schedules", self.base, "schedule").stage_ranks(pipeline_size, stages_per_rank)  # type: ignore[no-any-return]

    def bubble_fraction(self, pipeline_size: int, stages_per_rank: int, num_microbatches: int) -> float:
        return 0.0

    def max_in_flight(self, rank: int, pipeline_size: int, stages_per_rank: int, num_microbatches: int) -> int:
        return min(num_microbatches, 2 * (pipeline_size - rank) - 1)
