"""What every schedule offers: the shape of a part in `schedules/` and of one from another package."""

from __future__ import annotations

from typing import Protocol

from hybrid_strategy.spec.table import Cell, ScheduleTable

Refusal = tuple[str, object, str, str, str]
"""Key, value, rule, numbers, advice: what `errors.message` takes."""


class Schedule(Protocol):
    """A rule that makes a `ScheduleTable` of any size. All answers are exact for the table that `build` returns."""

    @property
    def name(self) -> str: ...

    @property
    def default_stages_per_rank(self) -> int: ...

    @property
    def uses_weight_pass(self) -> bool:
        """Is the backward pass split into `I` (input) and `W` (weight)?"""

    def refuse(self, pipeline_size: int, stages_per_rank: int, num_microbatches: int) -> Refusal | None:
        """Why these sizes cannot be played; None when they can."""

    def stage_ranks(self, pipeline_size: int, stages_per_rank: int) -> tuple[int, ...]:
        """The pipeline rank of each stage."""

    def build(self, pipeline_size: int, stages_per_rank: int, num_microbatches: int) -> ScheduleTable:
        """The table, for any number of micro-batches of 1 or more."""

    def rank_order(self, rank: int, pipeline_size: int, stages_per_rank: int, num_microbatches: int) -> tuple[Cell, ...]:
        """The row of `rank` in that table."""

    def bubble_fraction(self, pipeline_size: int, stages_per_rank: int, num_microbatches: int) -> float:
        """Idle share of a step when a forward pass takes 1, a backward 2 and each half of a split backward 1."""

    def max_in_flight(self, rank: int, pipeline_size: int, stages_per_rank: int, num_microbatches: int) -> int:
        """Most forward activations (stage x micro-batch) that `rank` holds at once."""
