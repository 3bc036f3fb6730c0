"""The layout of a run of which little is known: data parallelism, and no more of anything than the memory asks for.

A script's loader yields what one data-parallel rank consumes, so fewer of those mean another batch: nothing but a model that does
not fit any other way takes ranks from data parallelism.
"""

from __future__ import annotations

from dataclasses import replace

from hybrid_strategy.planning.memory import states_bytes_per_parameter
from hybrid_strategy.planning.numerics import Numerics
from hybrid_strategy.planning.search import Question, search
from hybrid_strategy.spec.cluster import ClusterSpec
from hybrid_strategy.spec.layout import SHARDINGS, Layout
from hybrid_strategy.spec.model_shape import ModelShape
from hybrid_strategy.units import GIB, format_count

FILLED = 0.6
"""Share of the memory that weights, gradients and optimizer states may fill; the rest is for what depends on the batch."""


def bare_layout(
    num_parameters: int, world_size: int, memory_bytes: float, numerics: Numerics, shape: ModelShape | None = None
) -> tuple[Layout, str]:
    """The layout, and why.

    Args:
        num_parameters: 0 where it is not known.
        memory_bytes: of one rank.
        shape: of the model, where it is known; only then can it be split.

    On 8 ranks of 80 GB: 1B parameters are held whole, 7B need sharded states, 30B sharded weights too.

    >>> from hybrid_strategy.planning.numerics import NUMERICS
    >>> [bare_layout(int(n * 1e9), 8, 80e9, NUMERICS["mixed"])[0].sharding for n in (1, 7, 30)]
    ['ddp', 'zero1', 'zero3']
    >>> bare_layout(0, 8, 80e9, NUMERICS["mixed"])[1]
    'data parallelism over 8 processes: the size of the model is not known'
    """
    plain = Layout(data_parallel_size=world_size)
    over = f"data parallelism over {world_size} processes"
    if not num_parameters:
        return plain, f"{over}: the size of the model is not known"
    room = f"{format_count(num_parameters)} parameters, {FILLED:.0%} of {memory_bytes / GIB:,.1f} GiB a rank"
    for sharding in SHARDINGS if world_size > 1 else SHARDINGS[:1]:
        held = num_parameters * states_bytes_per_parameter(numerics, sharding, world_size)
        if held <= FILLED * memory_bytes:
            return replace(plain, sharding=sharding), f"{over}, {sharding}: {held / GIB:,.1f} GiB of states ({room})"
    split = _split(shape, world_size, memory_bytes, numerics) if shape is not None else None
    if split is not None:
        return split, f"{split.name}: data parallelism alone does not fit ({room})"
    sharding = "zero3" if world_size > 1 else "ddp"
    return replace(
        plain, sharding=sharding
    ), f"{over}, {sharding}: it may not fit ({room}), and nothing is known of how to split it"


def _split(shape: ModelShape, world_size: int, memory_bytes: float, numerics: Numerics) -> Layout | None:
    """The planner's choice for one sequence a rank, on machines of which only the memory is known."""
    cluster = replace(ClusterSpec(), memory_bytes=memory_bytes, gpus_per_node=min(8, world_size), num_nodes=-(-world_size // 8))
    found = search(Question(shape, cluster, world_size, numerics, fixed={"micro_batch_size": 1}, world_size=world_size))
    return found.forecasts[0].scenario.layout if found.forecasts else None
