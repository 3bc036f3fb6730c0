"""What cannot be combined yet, in one place. A rule is lifted by taking its line away here."""

from __future__ import annotations

from hybrid_strategy.spec.layout import Layout
from hybrid_strategy.spec.schedule import Refusal, Schedule

WEIGHT_PASS_SHARDINGS = ("ddp", "zero1", "zero2")
"""Shardings under which a split backward is right: the gradient is whole only after the last weight pass, and `zero3` frees
and gathers the weights around every backward pass."""


def not_yet(layout: Layout, schedule: Schedule) -> Refusal | None:
    """The first thing in `layout` that is planned for but not available; None when there is none."""
    split = layout.pipeline_parallel_size > 1 and schedule.uses_weight_pass
    return (_split_refusal(layout, schedule) if split else None) or _compile_refusal(layout)


def _split_refusal(layout: Layout, schedule: Schedule) -> Refusal | None:
    """What a schedule that splits the backward pass excludes."""
    rule = f"it cannot be combined with the schedule {schedule.name}"
    if layout.sharding not in WEIGHT_PASS_SHARDINGS:
        numbers = "That schedule splits the backward pass, and gradients may be reduced only after the last weight pass"
        allowed = ", ".join(WEIGHT_PASS_SHARDINGS[:-1])
        advice = f"Set {allowed} or {WEIGHT_PASS_SHARDINGS[-1]}, or schedule=Interleaved1F1B"
        return "sharding", layout.sharding, rule, numbers, advice
    if layout.compile:
        numbers = "That schedule splits the backward pass in two, and compiled code makes all gradients of a layer in one go"
        return "compile", True, rule, numbers, "Set false, or schedule=Interleaved1F1B"
    return None


def _compile_refusal(layout: Layout) -> Refusal | None:
    if not layout.compile or layout.context_parallel_size == 1:
        return None
    rule = "it cannot be combined with context parallelism"
    numbers = "Attention over the ranks takes the place of torch's own while a layer runs, which compiled code would not see"
    return "compile", True, rule, numbers, "Set false, or context_parallel_size=1"
