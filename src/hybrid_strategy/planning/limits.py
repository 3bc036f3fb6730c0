"""What cannot be combined, in one place. A rule is lifted by taking its line away here."""

from __future__ import annotations

from hybrid_strategy.spec.layout import Layout
from hybrid_strategy.spec.schedule import Refusal, Schedule


def not_yet(layout: Layout, schedule: Schedule) -> Refusal | None:
    """The first thing in `layout` that is not available; None when there is none."""
    if layout.compile and layout.pipeline_parallel_size > 1 and schedule.uses_weight_pass:
        rule = f"it cannot be combined with the schedule {schedule.name}"
        numbers = "That schedule splits the backward pass in two, and compiled code makes all gradients of a layer in one go"
        return "compile", True, rule, numbers, "Set false, or schedule=Interleaved1F1B"
    if layout.compile and layout.context_parallel_size > 1:
        rule = "it cannot be combined with context parallelism"
        numbers = "Attention over the ranks takes the place of torch's own while a layer runs, which compiled code would not see"
        return "compile", True, rule, numbers, "Set false, or context_parallel_size=1"
    return None
