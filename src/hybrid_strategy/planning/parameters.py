"""A model's parameters by unit, and how many of them a rank holds: counted, not estimated."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from hybrid_strategy.spec.layout import Coordinate, Layout
from hybrid_strategy.spec.model_shape import ModelShape
from hybrid_strategy.spec.shard import even_chunk


@dataclass(frozen=True)
class Parameter:
    """A whole parameter: its shape, and the dimension that tensor parallelism splits (None: every rank holds all of it)."""

    shape: tuple[int, ...]
    split: int | None = None


@dataclass(frozen=True)
class Unit:
    """A unit of the model. A parameter that several units share has the same name in each of them."""

    name: str
    parameters: Mapping[str, Parameter]
    embedding: bool = False

    @property
    def num_parameters(self) -> int:
        return sum(math.prod(parameter.shape) for parameter in self.parameters.values())


def decoder_units(shape: ModelShape) -> tuple[Unit, ...]:
    """The units of a decoder: `embed_tokens`, `layers.0` ..., `norm`, `lm_head`, with the splits of Megatron (arXiv:1909.08053).

    >>> units = decoder_units(ModelShape(4096, 32, 32, 14336, 128256, 8192, num_key_value_heads=8))
    >>> len(units), count_parameters(units)
    (35, 8030261248)
    """
    hidden, vocabulary = shape.hidden_size, Parameter((shape.vocab_size, shape.hidden_size), split=0)
    embedding = {"embed_tokens.weight": vocabulary}
    if shape.learned_positions:
        embedding["embed_positions.weight"] = Parameter((shape.sequence_length, hidden))
    units = [Unit("embed_tokens", embedding, embedding=True)]
    for index in range(shape.num_layers):
        parameters = _layer_parameters(shape)
        units.append(Unit(f"layers.{index}", {f"layers.{index}.{name}": each for name, each in parameters}))
    units.append(Unit("norm", {f"norm.{name}": each for name, each in _norm(shape)}))
    units.append(Unit("lm_head", {"embed_tokens.weight" if shape.tied_embeddings else "lm_head.weight": vocabulary}))
    return tuple(units)


def _layer_parameters(shape: ModelShape) -> Iterator[tuple[str, Parameter]]:
    hidden, mlp = shape.hidden_size, shape.intermediate_size
    query, key_value = shape.num_attention_heads * shape.head_size, shape.kv_heads * shape.head_size
    columns = {"q_proj": query, "k_proj": key_value, "v_proj": key_value, "up_proj": mlp}
    if shape.gated_mlp:
        columns["gate_proj"] = mlp
    for name, width in columns.items():
        yield f"{name}.weight", Parameter((width, hidden), split=0)
        if shape.bias:
            yield f"{name}.bias", Parameter((width,), split=0)
    for name, width in {"o_proj": query, "down_proj": mlp}.items():
        yield f"{name}.weight", Parameter((hidden, width), split=1)
        if shape.bias:
            yield f"{name}.bias", Parameter((hidden,))
    for norm in ("input_norm", "post_attention_norm"):
        yield from ((f"{norm}.{name}", each) for name, each in _norm(shape))


def _norm(shape: ModelShape) -> list[tuple[str, Parameter]]:
    names = ("weight", "bias") if shape.bias else ("weight",)
    return [(name, Parameter((shape.hidden_size,))) for name in names]


def count_parameters(units: Iterable[Unit]) -> int:
    """Parameters of the whole model, shared ones once."""
    return sum(math.prod(parameter.shape) for parameter in _by_name(units).values())


def rank_parameters(layout: Layout, stages: Sequence[Sequence[Unit]], stage_ranks: Sequence[int]) -> tuple[int, ...]:
    """Parameters that each rank of the world holds between steps.

    Tensor-parallel ranks hold their block of a split dimension, by the rule of `even_chunk`; under `zero3` data-parallel ranks
    hold their block of the rows of that; `zero1` and `zero2` split states and gradients, not parameters. A parameter shared by
    two stages is held by both, once a rank.

    Args:
        stages: the units of each stage.
        stage_ranks: the pipeline rank of each stage.
    """
    held: list[Counter[Parameter]] = []
    for rank in range(layout.pipeline_parallel_size):
        units = (unit for stage, owner in zip(stages, stage_ranks, strict=True) if owner == rank for unit in stage)
        held.append(Counter(_by_name(units).values()))
    counts: dict[tuple[int, int, int], int] = {}
    result = []
    for rank in range(layout.world_size):
        at = layout.coordinate(rank)
        key = at.pipeline_parallel, at.tensor_parallel, at.data_parallel_shard
        if key not in counts:
            parameters = held[at.pipeline_parallel].items()
            counts[key] = sum(times * local_size(parameter, layout, at) for parameter, times in parameters)
        result.append(counts[key])
    return tuple(result)


def local_size(parameter: Parameter, layout: Layout, at: Coordinate) -> int:
    """Elements of `parameter` that the rank at a coordinate holds between steps.

    >>> layout = Layout(data_parallel_size=2, tensor_parallel_size=2, sharding="zero3")
    >>> [local_size(Parameter((7, 3), split=0), layout, layout.coordinate(rank)) for rank in range(4)]
    [6, 6, 6, 3]
    """
    shards = layout.shard_size if layout.sharding == "zero3" else 1
    return _local_size(
        parameter, layout.tensor_parallel_size, at.tensor_parallel, shards, at.data_parallel_shard if shards > 1 else 0
    )


@lru_cache(maxsize=65536)
def _local_size(parameter: Parameter, tensor_size: int, tensor_rank: int, shards: int, shard: int) -> int:
    sizes = list(parameter.shape)
    if parameter.split is not None:
        sizes[parameter.split] = even_chunk(sizes[parameter.split], tensor_size, tensor_rank)[1]
    sizes[0] = even_chunk(sizes[0], shards, shard)[1]
    return math.prod(sizes)


def _by_name(units: Iterable[Unit]) -> dict[str, Parameter]:
    return {name: parameter for unit in units for name, parameter in unit.parameters.items()}
