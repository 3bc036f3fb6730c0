"""From the user's sizes to a layout, or a refusal that names the nearest valid values. Nothing is started before this."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias, cast

from hybrid_strategy import registry
from hybrid_strategy.errors import LayoutError, did_you_mean, message
from hybrid_strategy.planning.balance import stage_count_refusal
from hybrid_strategy.planning.batches import batch_refusal
from hybrid_strategy.planning.choices import alone, divisors, nearest, nearest_multiples, one_of, together
from hybrid_strategy.planning.limits import not_yet
from hybrid_strategy.planning.refusals import check_whole, raise_if
from hybrid_strategy.planning.table_file import SUFFIX, file_schedule
from hybrid_strategy.spec.batch import BatchSpec
from hybrid_strategy.spec.layout import ACTIVATION_CHECKPOINTS, SHARDINGS, Layout
from hybrid_strategy.spec.model_shape import ModelShape
from hybrid_strategy.spec.schedule import Refusal, Schedule

Fits: TypeAlias = Callable[[Mapping[str, int], int], bool]
"""`fits(sizes, processes)`: would these sizes, for those that were given, be right for the model and the batch as well?"""

_SHORT = {
    "data_parallel_size": "data",
    "pipeline_parallel_size": "pipeline",
    "tensor_parallel_size": "tensor",
    "context_parallel_size": "context",
}


def find_schedule(name: str) -> Schedule:
    """The schedule of this name, in any case, or the table in the file of this name (`.csv`).

    Raises:
        ConfigError: there is no such schedule; the message has the nearest name.
        LayoutError: the file has no right table.
    """
    if str(name).lower().endswith(SUFFIX):
        return file_schedule(name)
    return cast(Schedule, registry.find("schedules", name, "schedule"))


def resolve_layout(
    *,
    world_size: int,
    data_parallel_size: int | str = "auto",
    tensor_parallel_size: int = 1,
    pipeline_parallel_size: int = 1,
    context_parallel_size: int = 1,
    data_parallel_replicate_size: int = 1,
    sharding: str = "ddp",
    sequence_parallel: bool = False,
    schedule: str = "1F1B",
    stages_per_rank: int | None = None,
    activation_checkpoint: str = "none",
    compile: bool = False,
    fits: Fits | None = None,
) -> Layout:
    """The layout of `world_size` processes, checked for everything that needs no model and no batch.

    Args:
        world_size: number of processes.
        data_parallel_size: `"auto"` takes the processes that the other sizes leave.
        stages_per_rank: None takes the schedule's own default (1 where there is no pipeline).
        schedule: in any case; the layout holds its own spelling.
        fits: which sizes are worth advising; default: all that multiply to the number of processes.

    The other arguments are the fields of `Layout`.

    Raises:
        LayoutError: sizes that cannot be honoured.
        ConfigError: an unknown schedule.

    >>> resolve_layout(world_size=8, tensor_parallel_size=2, pipeline_parallel_size=2).name
    'dp2_tp2_pp2'
    >>> resolve_layout(world_size=8, tensor_parallel_size=3)
    Traceback (most recent call last):
    hybrid_strategy.errors.LayoutError: tensor_parallel_size is 3: the product of the sizes must divide the number of \
processes. 3 (tensor) = 3 does not divide 8. Set 1, 2, 4 or 8, or start 6 or 9 processes.
    """
    sizes = {
        "pipeline_parallel_size": pipeline_parallel_size,
        "tensor_parallel_size": tensor_parallel_size,
        "context_parallel_size": context_parallel_size,
    }
    if data_parallel_size != "auto":
        sizes["data_parallel_size"] = cast(int, data_parallel_size)
    check_whole({"world_size": world_size, **sizes, "data_parallel_replicate_size": data_parallel_replicate_size})
    raise_if(_product_refusal(world_size, sizes, fits))
    part = find_schedule(schedule)
    if stages_per_rank is None:
        stages_per_rank = part.default_stages_per_rank if pipeline_parallel_size > 1 else 1
    layout = Layout(
        data_parallel_size=world_size // (pipeline_parallel_size * tensor_parallel_size * context_parallel_size),
        tensor_parallel_size=tensor_parallel_size,
        pipeline_parallel_size=pipeline_parallel_size,
        context_parallel_size=context_parallel_size,
        data_parallel_replicate_size=data_parallel_replicate_size,
        sharding=sharding,
        sequence_parallel=sequence_parallel,
        schedule=part.name,
        stages_per_rank=stages_per_rank,
        activation_checkpoint=activation_checkpoint,
        compile=compile,
    )
    check_layout(layout)
    return layout


def check_layout(
    layout: Layout,
    *,
    shape: ModelShape | None = None,
    batch: BatchSpec | None = None,
    num_units: int | None = None,
    gpus_per_node: int | None = None,
    heads: Mapping[str, int] | None = None,
    world_follows: bool = False,
) -> None:
    """Refuse what cannot be honoured; what is not given is not checked.

    `zero1`, `zero2` and `zero3` on one data-parallel rank are allowed and are the same thing as `ddp`: there is nothing to
    shard, and a run of one process with a cluster's settings is how such settings are debugged. A vocabulary need not be
    divisible by `tensor_parallel_size`.

    Args:
        shape: sizes of the model.
        batch: samples of a step and how they are cut.
        num_units: layers that stages can be made of; default `shape.num_layers`.
        gpus_per_node: accelerators of a node; None where a tensor-parallel group may cross nodes.
        heads: further numbers that `tensor_parallel_size` must divide, by name (`ParallelPlan.heads`).
        world_follows: there are as many processes as the sizes need, so that no advice is bound to their number.

    Raises:
        LayoutError: the first thing that is wrong.
        ConfigError: an unknown schedule.
    """
    check_whole({name: getattr(layout, name) for name in (*_SHORT, "data_parallel_replicate_size", "stages_per_rank")})
    _check_word("sharding", layout.sharding, SHARDINGS)
    _check_word("activation_checkpoint", layout.activation_checkpoint, ACTIVATION_CHECKPOINTS)
    schedule = find_schedule(layout.schedule)
    splits = _tensor_divisors(shape, heads)
    layers = num_units if num_units is not None else shape.num_layers if shape else None
    for refusal in (
        _ignored_refusal(layout),
        schedule.refuse(layout.pipeline_parallel_size, layout.stages_per_rank, batch.num_microbatches if batch else 1),
        _replicate_refusal(layout),
        not_yet(layout, schedule),
        _heads_refusal(layout, splits, gpus_per_node, world_follows),
        _node_refusal(layout, splits, gpus_per_node, world_follows),
        _sequence_refusal(layout, shape),
        _stages_refusal(layout, layers, world_follows),
        batch_refusal(layout, batch) if batch else None,
    ):
        raise_if(refusal)


def _check_word(key: str, word: str, known: Sequence[str]) -> None:
    if word not in known:
        raise LayoutError(message(key, word, f"there is no {key} of this name", "", did_you_mean(str(word), known)))


def _product_refusal(world_size: int, sizes: Mapping[str, int], fits: Fits | None) -> Refusal | None:
    """Sizes that do not multiply to the world, or do not divide it where the data-parallel size is what is left."""
    exact, whole = "data_parallel_size" in sizes, math.prod(sizes.values())
    if whole == world_size if exact else world_size % whole == 0:
        return None
    rule = "the sizes must multiply to" if exact else "the product of the sizes must divide"
    factors = " x ".join(f"{size} ({_SHORT[key]})" for key, size in sizes.items() if size > 1) or "1"
    numbers = f"{factors} = {whole}{', not' if exact else ' does not divide'} {world_size}"
    key, repair = _repair(world_size, sizes, exact, fits or _all_fit)
    start = _processes(world_size, sizes, exact, fits or _all_fit)
    if not repair and not start:  # something else is wrong as well, whatever the sizes
        (key, repair), start = _repair(world_size, sizes, exact, _all_fit), _processes(world_size, sizes, exact, _all_fit)
    advice = ", or ".join(part for part in (repair, start) if part)
    return key, sizes[key], f"{rule} the number of processes", numbers, advice[:1].upper() + advice[1:]


def _all_fit(sizes: Mapping[str, int], processes: int) -> bool:
    return True


def _repair(world_size: int, sizes: Mapping[str, int], exact: bool, fits: Fits) -> tuple[str, str]:
    """The size to change, and the values that would do for this number of processes: of that one alone, else of all together."""
    alones = {key: alone(sizes, key, world_size, exact) for key, size in sizes.items() if size > 1 or exact}
    fitting = {key: [each for each in found if fits({**sizes, key: each}, world_size)] for key, found in alones.items()}
    culprits = [key for key, values in fitting.items() if values]
    if culprits:
        key = min(culprits, key=lambda each: (world_size % sizes[each] == 0, each != "data_parallel_size"))
        return key, f"set {one_of(nearest(fitting[key], sizes[key]))}"
    key = max(sizes, key=lambda each: (world_size % sizes[each] != 0, sizes[each]))
    sets = together(sizes, world_size, exact, lambda each: fits({**sizes, **each}, world_size))
    named = [" and ".join(f"{name}={size}" for name, size in each.items()) for each in sets]
    return key, f"set {one_of(named)}" if named else ""


def _processes(world_size: int, sizes: Mapping[str, int], exact: bool, fits: Fits) -> str:
    """How many processes these sizes are right for, next to the number that there is."""
    whole = math.prod(sizes.values())
    below = range(world_size // whole * whole, 0, -whole)
    above = range(world_size // whole * whole + whole, 4 * max(world_size, whole) + 1, whole)
    sides: tuple[Iterable[int], ...] = ([whole],) if exact else (below, above)
    found = [next((each for each in side if fits(sizes, each)), 0) for side in sides]
    worlds = [each for each in found if each]
    return f"start {one_of(worlds)} process{'es' if worlds != [1] else ''}" if worlds else ""


def _ignored_refusal(layout: Layout) -> Refusal | None:
    """Settings that would do nothing."""
    if layout.sequence_parallel and layout.tensor_parallel_size == 1:
        rule = "it splits activations over the tensor-parallel ranks, and would be ignored"
        return "sequence_parallel", True, rule, "tensor_parallel_size is 1", "Set false, or tensor_parallel_size=2 or more"
    if layout.stages_per_rank > 1 and layout.pipeline_parallel_size == 1:
        rule = "it cuts the layers of each pipeline rank into stages, and would be ignored"
        numbers, advice = "pipeline_parallel_size is 1", "Set 1, or pipeline_parallel_size=2 or more"
        return "stages_per_rank", layout.stages_per_rank, rule, numbers, advice
    return None


def _replicate_refusal(layout: Layout) -> Refusal | None:
    """`data_parallel_replicate_size` must split the data-parallel ranks into shard groups of two or more."""
    key, size, ranks = "data_parallel_replicate_size", layout.data_parallel_replicate_size, layout.data_parallel_size
    if size == 1:
        return None
    if layout.sharding == "ddp":
        rule, numbers = "every rank is a replica under ddp, so it would be ignored", f"data_parallel_size is {ranks}"
        return key, size, rule, numbers, "Set 1, or sharding=zero1, zero2 or zero3"
    valid = one_of(nearest([each for each in divisors(ranks) if each < ranks or ranks == 1], size))
    if ranks % size:
        rule, numbers = "it must divide data_parallel_size", f"{size} does not divide {ranks}"
        return key, size, rule, numbers, f"Set {valid}"
    if size == ranks:
        rule = f"with as many replicas as data-parallel ranks {layout.sharding} shards nothing"
        return key, size, rule, f"{ranks} / {size} = 1 rank to shard over", f"Set {valid}, or sharding=ddp"
    return None


def _tensor_divisors(shape: ModelShape | None, heads: Mapping[str, int] | None) -> dict[str, int]:
    """What `tensor_parallel_size` must divide, by name."""
    known = {"num_attention_heads": shape.num_attention_heads, "num_key_value_heads": shape.kv_heads} if shape else {}
    return {**known, **(heads or {})}


def _tensor_sizes(layout: Layout, splits: Mapping[str, int], gpus_per_node: int | None, world_follows: bool) -> list[int]:
    """Every tensor-parallel size that this world, this model and this node allow."""
    spare = layout.world_size // (layout.pipeline_parallel_size * layout.context_parallel_size)
    free = world_follows and splits
    return [
        size
        for size in divisors(math.gcd(*splits.values()) if free else spare)
        if all(number % size == 0 for number in splits.values()) and not _crosses(size, layout.world_size, gpus_per_node)
    ]


def _crosses(tensor_size: int, world_size: int, gpus_per_node: int | None) -> bool:
    """Would some group of `tensor_size` neighbouring ranks lie on two nodes?"""
    return gpus_per_node is not None and world_size > gpus_per_node and gpus_per_node % tensor_size != 0


def _heads_refusal(layout: Layout, splits: Mapping[str, int], gpus_per_node: int | None, world_follows: bool) -> Refusal | None:
    size = layout.tensor_parallel_size
    for name, number in splits.items():
        if number % size:
            valid = _tensor_sizes(layout, splits, gpus_per_node, world_follows)
            numbers = f"{size} does not divide {number}; {one_of(divisors(number))} would"
            where = f" ({layout.world_size} processes, pipeline_parallel_size {layout.pipeline_parallel_size})"
            advice = f"Set {one_of(nearest(valid, size))}{'' if world_follows else where}"
            return "tensor_parallel_size", size, f"it must divide {name}", numbers, advice
    return None


def _node_refusal(layout: Layout, splits: Mapping[str, int], gpus_per_node: int | None, world_follows: bool) -> Refusal | None:
    size = layout.tensor_parallel_size
    if not _crosses(size, layout.world_size, gpus_per_node):
        return None
    valid = _tensor_sizes(layout, splits, gpus_per_node, world_follows)
    rule = "a tensor-parallel group must stay inside one node, since it communicates in every layer"
    numbers = f"groups of {size} do not fit evenly into nodes of {gpus_per_node}"
    return "tensor_parallel_size", size, rule, numbers, f"Set {one_of(nearest(valid, size))}"


def _sequence_refusal(layout: Layout, shape: ModelShape | None) -> Refusal | None:
    """Parts of a sequence must be equally long: two chunks a context-parallel rank, cut once more by sequence parallelism."""
    if shape is None:
        return None
    length, context = shape.sequence_length, layout.context_parallel_size
    tensor = layout.tensor_parallel_size if layout.sequence_parallel else 1
    if context > 1 and length % (2 * context):
        rule = "context_parallel_size cuts it into two equal chunks a rank"
        numbers = f"2 x {context} (context) = {2 * context} does not divide {length}"
        valid = one_of(nearest_multiples(length, math.lcm(2 * context, context * tensor)))
        return "sequence_length", length, rule, numbers, f"Set {valid}, or context_parallel_size=1"
    if length % (context * tensor) == 0:
        return None
    over = f"{tensor}" if context == 1 else f"{tensor} (tensor) x {context} (context) = {tensor * context}"
    rule = "sequence_parallel splits it evenly over the tensor-parallel ranks"
    valid = one_of(nearest_multiples(length, math.lcm(2 * context, context * tensor) if context > 1 else tensor))
    return "sequence_length", length, rule, f"{over} does not divide {length}", f"Set {valid}, or sequence_parallel=false"


def _stages_refusal(layout: Layout, num_layers: int | None, world_follows: bool) -> Refusal | None:
    if num_layers is None:
        return None
    spare = layout.world_size // (layout.tensor_parallel_size * layout.context_parallel_size)
    sizes = None if world_follows else divisors(spare)
    return stage_count_refusal(layout.pipeline_parallel_size, layout.stages_per_rank, num_layers, sizes)
