"""The axes of a layout sweep: what a free axis is tried with, given the sizes outside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hybrid_strategy import registry
from hybrid_strategy.errors import ConfigError, did_you_mean, message
from hybrid_strategy.planning.choices import divisors
from hybrid_strategy.planning.layouts import find_schedule
from hybrid_strategy.spec.layout import SHARDINGS

AXES = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "context_parallel_size",
    "data_parallel_size",
    "sharding",
    "data_parallel_replicate_size",
    "sequence_parallel",
    "schedule",
    "stages_per_rank",
    "num_microbatches",
    "activation_checkpoint",
)
"""Keys of `strategy` that a layout sweep may vary, in the order in which they are decided."""

USUAL = ("tensor_parallel_size", "pipeline_parallel_size", "sharding")
"""Axes that are free where nothing else is said; the data-parallel size is what they leave."""

STAGES_PER_RANK = (1, 2, 3, 4)
MICROBATCHES_PER_RANK = (1, 2, 4, 8, 16)
_SLOW = ("sequential",)
"""Schedules that are a baseline, never the best."""

Values = tuple[Any, ...]


@dataclass(frozen=True)
class Axes:
    """What is tried of each axis.

    Attributes:
        given: axis -> the values asked for, in the order in which they were given.
        free: axes that are tried with everything that makes sense.
        fixed: axis -> its one value, where it is neither given nor free.
    """

    given: Mapping[str, Values] = field(default_factory=dict)
    free: Sequence[str] = USUAL
    fixed: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for axis in (*self.given, *self.free):
            if axis not in AXES:
                rule = "it is no axis of a layout"
                raise ConfigError(message("hydra.sweeper.axes", axis, rule, "", did_you_mean(axis, AXES)))

    def values(self, axis: str, usual: Sequence[Any]) -> Values:
        """What `axis` is tried with; `usual` is what a free one is."""
        if axis in self.given:
            return self.given[axis]
        return tuple(usual) if axis in self.free else (self.fixed[axis],) if axis in self.fixed else (None,)

    @property
    def swept(self) -> tuple[str, ...]:
        """The axes that vary, in order."""
        return tuple(axis for axis in AXES if axis in self.free or len(self.given.get(axis, ())) > 1)


def usual_shardings(replicas: int) -> Values:
    """Where the parameters have one copy there is nothing to shard: all are `ddp`."""
    return SHARDINGS if replicas > 1 else SHARDINGS[:1]


def usual_replicas(sharding: str, data_size: int, tensor_size: int, gpus_per_node: int | None) -> Values:
    """Groups as large as they can be, and groups that stay inside a node."""
    inside = (gpus_per_node or 0) // tensor_size
    if sharding == "ddp" or not 1 < inside < data_size or data_size % inside:
        return (1,)
    return (1, data_size // inside)


def usual_schedules(pipeline_size: int, base: str | None) -> Values:
    """Without a pipeline there is nothing to schedule."""
    if pipeline_size == 1:
        return (base,)
    return tuple(name for name in registry.parts("schedules") if name not in _SLOW)


def usual_stages(pipeline_size: int, schedule: str) -> Values:
    """The schedule's own number, and more where it takes more."""
    if pipeline_size == 1:
        return (1,)
    part = find_schedule(schedule)
    own = part.default_stages_per_rank
    more = (own, *(each for each in STAGES_PER_RANK if each > own > 1))
    return tuple(each for each in more if part.refuse(pipeline_size, each, pipeline_size) is None)


def usual_microbatches(pipeline_size: int, rows: int) -> Values:
    """Multiples of the pipeline's size where there is one; divisors of the batch, so that all are of one size."""
    counts = [pipeline_size * each for each in MICROBATCHES_PER_RANK]
    even = [each for each in divisors(rows) if each in counts]
    return tuple(even) or (min(rows, pipeline_size),)
