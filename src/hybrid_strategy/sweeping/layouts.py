"""All layouts of a sweep by arithmetic, valid or refused, before any of them is composed.

Decided from the outside in: what is wrong with the sizes alone is refused once, not once for every schedule below them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from math import prod
from typing import Any

from hybrid_strategy.errors import ConfigError, LayoutError, did_you_mean, message
from hybrid_strategy.planning.batches import resolve_batch
from hybrid_strategy.planning.choices import context_sizes, divisors
from hybrid_strategy.planning.layouts import check_layout, find_schedule, resolve_layout
from hybrid_strategy.spec.batch import BatchSpec
from hybrid_strategy.spec.layout import ACTIVATION_CHECKPOINTS, SHARDINGS, Layout
from hybrid_strategy.spec.model_shape import ModelShape
from hybrid_strategy.sweeping.axes import (
    Axes,
    Values,
    usual_microbatches,
    usual_replicas,
    usual_schedules,
    usual_shardings,
    usual_stages,
)


@dataclass(frozen=True)
class Space:
    """Where layouts are looked for.

    Attributes:
        world_size: processes of every point.
        gpus_per_node: None where all processes are on one machine.
        shape: of the model; None where it is not known.
        global_batch_size: samples of a step; None where it is not known.
        micro_batch_size: of every point, where the configuration fixes it.
    """

    world_size: int
    axes: Axes
    gpus_per_node: int | None = None
    shape: ModelShape | None = None
    global_batch_size: int | None = None
    accumulate_grad_batches: int = 1
    micro_batch_size: int | None = None


@dataclass(frozen=True)
class Candidate:
    """A layout that the engine will take. `values` is what its point sets, axis by axis."""

    layout: Layout
    batch: BatchSpec
    values: Mapping[str, Any]


@dataclass(frozen=True)
class Skipped:
    """A point, or all points below it, that is not run.

    Attributes:
        name: of the layout, as far as it was decided.
        kind: `refused`, `memory`, `time` or `rank` (not among the best).
        reason: in one sentence.
        count: points that it stands for, as far as they were looked at.
    """

    name: str
    kind: str
    reason: str
    values: Mapping[str, Any] = field(default_factory=dict)
    count: int = 1


Found = Candidate | Skipped


def layouts(space: Space) -> Iterator[Found]:
    """Every layout of the space.

    >>> from hybrid_strategy.sweeping.axes import Axes
    >>> [each.layout.name for each in layouts(Space(2, Axes(), global_batch_size=8)) if isinstance(each, Candidate)]
    ['dp2', 'dp2_zero1', 'dp2_zero2', 'dp2_zero3', 'pp2', 'tp2']
    """
    for sizes in _sizes(space):
        if isinstance(sizes, Skipped):
            yield sizes
            continue
        refused = _refusal(space, sizes)
        if refused is not None:
            yield Skipped(sizes.name, "refused", refused, _size_values(space, sizes))
            continue
        yield from _nothing_to_shard(space, sizes)
        for layout, values in _inner(space, sizes):
            yield from _batches(space, layout, values)


def _sizes(space: Space) -> Iterator[Layout | Skipped]:
    """Tensor, pipeline, context and data-parallel sizes that multiply to the world."""
    axes, world = space.axes, space.world_size
    length = space.shape.sequence_length if space.shape is not None else 0
    exact = not {"tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size"} & set(axes.free)
    # data-parallel sizes that are part of no layout, each with sizes that were tried beside it
    left = {each: (0, 0, 0) for each in axes.values("data_parallel_size", ("auto",)) if each not in (None, "auto")}
    for tensor in axes.values("tensor_parallel_size", divisors(world)):
        tensor = tensor or 1
        if world % tensor:
            yield _resolved(world, (tensor, 1, 1), "auto")
            continue
        pipelines = axes.values("pipeline_parallel_size", divisors(world // tensor))
        contexts = axes.values("context_parallel_size", context_sizes(world // tensor, length))
        for pipeline, context in product(pipelines, contexts):
            inner = (tensor, pipeline or 1, context or 1)
            if "context_parallel_size" in axes.free and world % prod(inner):
                continue
            for data in axes.values("data_parallel_size", ("auto",)):
                wanted = "auto" if data is None else data
                if wanted == "auto" or prod(inner) * wanted == world or exact:
                    left.pop(wanted, None)
                    yield _resolved(world, inner, wanted)
                elif left.get(wanted) == (0, 0, 0):
                    left[wanted] = inner
    yield from (_resolved(world, inner, data) for data, inner in left.items() if inner != (0, 0, 0))


def _resolved(world: int, inner: tuple[int, int, int], data: int | str) -> Layout | Skipped:
    """The layout of tensor, pipeline and context-parallel sizes `inner`."""
    tensor, pipeline, context = inner
    sizes: dict[str, Any] = {"tensor_parallel_size": tensor, "pipeline_parallel_size": pipeline, "context_parallel_size": context}
    try:
        return resolve_layout(world_size=world, data_parallel_size=data, **sizes)
    except LayoutError as error:
        rows = {**sizes, "data_parallel_size": data}
        named = zip(("tp", "pp", "cp", "dp"), rows.values(), strict=True)
        name = "_".join(f"{short}{size}" for short, size in named if size != "auto" and (short, size) != ("cp", 1))
        rows = {key: size for key, size in rows.items() if (key, size) != ("context_parallel_size", 1)}
        return Skipped(name, "refused", str(error), rows)


def _refusal(space: Space, layout: Layout, batch: BatchSpec | None = None) -> str | None:
    nodes = space.gpus_per_node if space.gpus_per_node and space.world_size > space.gpus_per_node else None
    if batch is None and space.global_batch_size:
        batch = BatchSpec(space.global_batch_size, 1, space.accumulate_grad_batches)
    try:
        check_layout(layout, shape=space.shape, batch=batch, gpus_per_node=nodes)
    except LayoutError as error:
        return str(error)
    return None


def _size_values(space: Space, layout: Layout) -> dict[str, Any]:
    keys = ("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size", "data_parallel_size")
    return {key: getattr(layout, key) for key in keys if key in space.axes.given or key in space.axes.free}


def _shardings(space: Space, sizes: Layout) -> tuple[Values, Values]:
    """Those that are tried, and those that would be the same run once more: parameters of one copy are not sharded."""
    copies = sizes.data_parallel_size * sizes.context_parallel_size
    values = space.axes.values("sharding", usual_shardings(copies))
    return (values, ()) if copies > 1 else (values[:1], values[1:])


def _nothing_to_shard(space: Space, sizes: Layout) -> Iterator[Skipped]:
    (first, *_), same = _shardings(space, sizes)
    for sharding in same:
        rule = "one data-parallel rank has nothing to shard"
        reason = message("sharding", sharding, rule, f"It would be the run with {first or 'ddp'} once more", "")
        yield Skipped(f"{sizes.name}_{sharding}", "refused", reason, {**_size_values(space, sizes), "sharding": sharding})


def _inner(space: Space, sizes: Layout) -> Iterator[tuple[Layout, dict[str, Any]]]:
    """Sharding, sequence parallelism and schedule of one set of sizes."""
    axes, data, tensor, pipeline = space.axes, sizes.data_parallel_size, sizes.tensor_parallel_size, sizes.pipeline_parallel_size
    for sharding in _shardings(space, sizes)[0]:
        sharding = sharding or "ddp"
        replicas = usual_replicas(sharding, data, tensor, space.gpus_per_node)
        sequences = (False, True) if tensor > 1 else (False,)
        for replica, sequence in product(
            axes.values("data_parallel_replicate_size", replicas), axes.values("sequence_parallel", sequences)
        ):
            schedules = axes.values("schedule", usual_schedules(pipeline, axes.fixed.get("schedule")))
            for schedule in schedules if pipeline > 1 else schedules[:1]:  # nothing to schedule: all of them are the same run
                schedule = schedule or "1F1B"
                for stages in axes.values("stages_per_rank", usual_stages(pipeline, schedule)):
                    values = {
                        **_size_values(space, sizes),
                        "sharding": sharding,
                        "data_parallel_replicate_size": replica or 1,
                        "sequence_parallel": bool(sequence),
                        "schedule": schedule,
                        "stages_per_rank": stages,
                    }
                    yield sizes, values


def _batches(space: Space, sizes: Layout, values: dict[str, Any]) -> Iterator[Found]:
    """Micro-batches of one layout."""
    tried = {key: value for key, value in values.items() if not key.endswith("parallel_size")}
    try:
        layout = resolve_layout(
            world_size=space.world_size,
            tensor_parallel_size=sizes.tensor_parallel_size,
            pipeline_parallel_size=sizes.pipeline_parallel_size,
            context_parallel_size=sizes.context_parallel_size,
            compile=bool(space.axes.fixed.get("compile")),
            **tried,
        )
    except LayoutError as error:
        yield Skipped(_name(sizes, values), "refused", str(error), _said(space, values))
        return
    rows = (space.global_batch_size or 0) // (layout.data_parallel_size * space.accumulate_grad_batches)
    usual = usual_microbatches(layout.pipeline_parallel_size, rows) if rows else (None,)
    for count in space.axes.values("num_microbatches", usual):
        said = _said(space, {**values, "num_microbatches": count})
        try:
            batch = _batch(space, layout, count)
        except LayoutError as error:
            yield Skipped(layout.name, "refused", str(error), said)
            continue
        refused = _refusal(space, layout, batch if space.global_batch_size else None)
        if refused is not None:
            yield Skipped(layout.name, "refused", refused, said)
            continue
        yield from _recomputed(space, layout, batch, said)


def _recomputed(space: Space, layout: Layout, batch: BatchSpec, said: Mapping[str, Any]) -> Iterator[Found]:
    """One layout with each kind of activation checkpoint."""
    for kind in space.axes.values("activation_checkpoint", ACTIVATION_CHECKPOINTS):
        kind = kind or "none"
        made = layout if kind == "none" else replace(layout, activation_checkpoint=kind)
        values = {**said, **_said(space, {"activation_checkpoint": kind})}
        checked = kind == "none" or "activation_checkpoint" in space.axes.free  # a free axis is tried with what is allowed
        refused = None if checked else _refusal(space, made)
        yield Candidate(made, batch, values) if refused is None else Skipped(made.name, "refused", refused, values)


def _batch(space: Space, layout: Layout, count: int | None) -> BatchSpec:
    if not space.global_batch_size:
        return BatchSpec(0, count or 1, space.accumulate_grad_batches)
    return resolve_batch(
        layout,
        global_batch_size=space.global_batch_size,
        num_microbatches=count,
        micro_batch_size=space.micro_batch_size if count is None else None,
        accumulate_grad_batches=space.accumulate_grad_batches,
    )


def _said(space: Space, values: Mapping[str, Any]) -> dict[str, Any]:
    """What a point must set: the axes that the sweep decides, where they differ from saying nothing."""
    decided = {*space.axes.given, *space.axes.free}
    return {axis: value for axis, value in values.items() if axis in decided and value is not None}


def _name(sizes: Layout, values: Mapping[str, Any]) -> str:
    """A name of something that may be no layout."""
    words = [sizes.name, values["sharding"] if values["sharding"] != "ddp" else "", str(values["schedule"])]
    return "_".join(word for word in words if word)


def check_values(axis: str, values: tuple[Any, ...]) -> None:
    """Refuse words that name nothing: a typo is no layout that happens not to fit.

    Raises:
        ConfigError: there is no such sharding, schedule or kind of recomputation.
    """
    known = {"sharding": SHARDINGS, "activation_checkpoint": ACTIVATION_CHECKPOINTS}.get(axis)
    for value in values:
        if axis == "schedule":
            find_schedule(str(value))
        elif known is not None and value not in known:
            rule = f"there is no {axis} of this name"
            raise ConfigError(message(f"strategy.{axis}", value, rule, "", did_you_mean(str(value), known)))
