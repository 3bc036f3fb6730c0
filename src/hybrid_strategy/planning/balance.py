"""Cuts a model's units into pipeline stages so that the slowest stage is as fast as it can be."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise

from hybrid_strategy.errors import LayoutError, message
from hybrid_strategy.planning.choices import nearest, one_of
from hybrid_strategy.planning.flops import attention_score_flops, layer_matmul_parameters
from hybrid_strategy.planning.refusals import raise_if
from hybrid_strategy.spec.model_shape import ModelShape
from hybrid_strategy.spec.schedule import Refusal

EMBEDDING_SHARE = 0.25
"""Cost of the input embedding as a share of a head of the same size. Looking up a row is no product, so by time alone it would
be nothing. But its weight, gradient and optimizer state fill the memory of the first stage, which holds the most activations,
and the optimizer walks through them at every step. A quarter takes a layer or two off the first stage of a model with a large
vocabulary and next to nothing off one with a small vocabulary."""

_NORM_FLOPS = 4.0
_TOLERANCE = 1e-9


def unit_costs(shape: ModelShape) -> list[float]:
    """Forward FLOPs a token of `embed_tokens`, each layer, `norm` and `lm_head`, in order; the embedding by `EMBEDDING_SHARE`.

    Attention counts by its causal half. Backward passes cost the same multiple everywhere and do not move a cut.

    >>> costs = unit_costs(ModelShape(4096, 32, 32, 14336, 128256, 8192, num_key_value_heads=8))
    >>> len(costs), round(costs[0] / costs[1], 2), round(costs[-1] / costs[1], 2)
    (35, 0.52, 2.09)
    """
    head = 2.0 * shape.vocab_size * shape.hidden_size
    layer = 2.0 * layer_matmul_parameters(shape) + attention_score_flops(shape, 1) / 2
    return [EMBEDDING_SHARE * head, *[layer] * shape.num_layers, _NORM_FLOPS * shape.hidden_size, head]


def parameter_costs(parameters: Sequence[int], embeddings: Sequence[bool]) -> list[float]:
    """Costs of the units of any model, of which only parameter counts are known; embeddings count by `EMBEDDING_SHARE`.

    A product takes two operations for every weight and token, so that parameters stand for time, save for attention scores.

    >>> parameter_costs([100, 60, 100], [True, False, False])
    [25.0, 60.0, 100.0]
    """
    return [count * (EMBEDDING_SHARE if embedding else 1.0) for count, embedding in zip(parameters, embeddings, strict=True)]


def unit_names(shape: ModelShape) -> tuple[str, ...]:
    """The units that `unit_costs` weighs."""
    return ("embed_tokens", *(f"layers.{index}" for index in range(shape.num_layers)), "norm", "lm_head")


def layer_like(units: Iterable[str]) -> tuple[bool, ...]:
    """Which units are layers: those that a pattern with `*` stands for, so that their name ends in a number; if none, all.

    >>> layer_like(("embed_tokens", "layers.0", "layers.1", "norm")), layer_like(("down", "middle", "up"))
    ((False, True, True, False), (True, True, True))
    """
    numbered = tuple(unit.rpartition(".")[2].isdigit() for unit in units)
    return numbered if any(numbered) else (True,) * len(numbered)


def balance(costs: Sequence[float], num_stages: int, layers: Sequence[bool] | None = None) -> tuple[int, ...]:
    """The best cut of `costs` into `num_stages` contiguous stages, each with a layer.

    Best: the largest stage is as small as possible; among those cuts the sum of squares is least (the others are even); among
    those the first stages are the smaller ones, since they hold the most activations.

    Args:
        costs: cost of each unit, in the model's order, none negative.
        num_stages: stages to make.
        layers: which units are layers; default all. Each stage holds at least one.

    Returns:
        The index of the first unit of every stage but the first: `num_stages - 1` rising numbers.

    Raises:
        LayoutError: more stages than layers.

    >>> balance([1, 1, 1, 1, 1, 1, 1], 3), balance([0.5, 1, 1, 1, 1, 0, 2], 2, [False, True, True, True, True, False, False])
    ((2, 4), (4,))
    """
    marks = tuple(layers) if layers is not None else (True,) * len(costs)
    raise_if(stage_count_refusal(num_stages, 1, sum(marks)))
    return _best_cuts(tuple(float(cost) for cost in costs), num_stages, marks)


def cut_units(
    units: Sequence[str],
    num_stages: int,
    costs: Sequence[float] | None = None,
    stage_cuts: Sequence[int] | None = None,
) -> tuple[tuple[str, ...], ...]:
    """The units of each stage: every unit once, in order.

    Args:
        units: unit names in the model's order, patterns expanded; which are layers says `layer_like`.
        num_stages: stages to make.
        costs: cost of each unit; default: a layer 1, any other unit 0.
        stage_cuts: index of the first unit of every stage but the first; default: the balanced cut.

    Raises:
        LayoutError: more stages than layers, or cuts that leave a stage without a layer.

    >>> cut_units(("embed_tokens", "layers.0", "layers.1", "layers.2", "norm", "lm_head"), 2)
    (('embed_tokens', 'layers.0'), ('layers.1', 'layers.2', 'norm', 'lm_head'))
    """
    layers = layer_like(units)
    if stage_cuts is None:
        weights = costs if costs is not None else [float(mark) for mark in layers]
        stage_cuts = balance(weights, num_stages, layers)
    else:
        check_cuts(stage_cuts, num_stages, layers)
    bounds = (0, *stage_cuts, len(units))
    return tuple(tuple(units[first:last]) for first, last in pairwise(bounds))


def check_cuts(stage_cuts: Sequence[int], num_stages: int, layers: Sequence[bool]) -> None:
    """Refuse cuts that are not `num_stages - 1` rising indices with a layer in every stage."""
    key, cuts = "stage_cuts", list(stage_cuts)
    advice = "Set the index of the first unit of every stage but the first, or leave it out for the balanced cut"
    if len(cuts) != num_stages - 1:
        rule, numbers = "one cut fewer than stages is needed", f"{len(cuts)} cuts for {num_stages} stages"
        raise LayoutError(message(key, cuts, rule, numbers, advice))
    bounds = [0, *cuts, len(layers)]
    if any(not isinstance(cut, int) or first >= cut for first, cut in pairwise(bounds)):
        rule, numbers = "the cuts must rise and leave no stage empty", f"The model has {len(layers)} units"
        raise LayoutError(message(key, cuts, rule, numbers, advice))
    for stage, (first, last) in enumerate(pairwise(bounds)):
        if not any(layers[first:last]):
            numbers = f"Stage {stage} has the units {first} to {last - 1}, none of them a layer"
            raise LayoutError(message(key, cuts, "every stage needs a layer of its own", numbers, advice))


def stage_count_refusal(
    pipeline_size: int, stages_per_rank: int, num_layers: int, pipeline_sizes: Sequence[int] | None = None
) -> Refusal | None:
    """More stages than layers: a stage without a layer would compute nothing.

    Args:
        pipeline_sizes: sizes that the number of processes allows, for the advice; default: all.
    """
    stages = pipeline_size * stages_per_rank
    if stages <= num_layers:
        return None
    rule = "every stage needs a layer of its own"
    made = f"{_counted(pipeline_size, 'rank')} x {_counted(stages_per_rank, 'stage')} = {stages} stages"
    numbers = f"{made} for {_counted(num_layers, 'layer')}"
    if num_layers == 1:
        numbers += ", and one that the model calls several times lies on one rank"
    fitting = num_layers // pipeline_size
    if stages_per_rank > 1 and fitting > 1:
        return "stages_per_rank", stages_per_rank, rule, numbers, f"Set {one_of(range(2, fitting + 1))}"
    sizes = [size for size in pipeline_sizes or range(1, num_layers + 1) if size * stages_per_rank <= num_layers]
    if num_layers == 1:
        return "pipeline_parallel_size", pipeline_size, rule, numbers, "Set 1"
    advice = f"Set {one_of(nearest(sizes, pipeline_size))}" if sizes else "Set stages_per_rank=1 and fewer stages"
    return "pipeline_parallel_size", pipeline_size, rule, numbers, advice


def _counted(number: int, noun: str) -> str:
    """
    >>> _counted(1, "layer"), _counted(2, "layer")
    ('1 layer', '2 layers')
    """
    return f"{number} {noun}{'' if number == 1 else 's'}"


@lru_cache(maxsize=1024)
def _best_cuts(costs: tuple[float, ...], num_stages: int, layers: tuple[bool, ...]) -> tuple[int, ...]:
    """Two dynamic programmes: the least largest stage, then the least sum of squares among the cuts that reach it."""
    total = (0.0, *accumulate(costs))
    limit, _ = _programme(total, num_stages, layers, math.inf, squares=False)
    _, cuts = _programme(total, num_stages, layers, limit * (1 + _TOLERANCE), squares=True)
    return cuts


def _programme(
    total: Sequence[float], num_stages: int, layers: Sequence[bool], limit: float, squares: bool
) -> tuple[float, tuple[int, ...]]:
    """The best way to make stages of at most `limit`, and its cuts; `value[end]` is that of the units before `end`.

    The last stage of each part grows from its end towards the front, until it is too large to be any good. The stages before it,
    and those still to come, have a unit each at least.
    """
    units = len(layers)
    value = [0.0] + [math.inf] * units
    starts: list[list[int]] = []
    for stages in range(num_stages):
        best, first = [math.inf] * (units + 1), [-1] * (units + 1)
        for end in range(stages + 1, units + 2 - num_stages + stages):
            has_layer = False
            for start in range(end - 1, stages - 1, -1):
                has_layer = has_layer or layers[start]
                stage = total[end] - total[start]
                if stage > (limit if squares else best[end]):
                    break
                found = value[start] + stage * stage if squares else max(value[start], stage)
                if has_layer and found < math.inf and found <= best[end] * (1 + _TOLERANCE):
                    best[end], first[end] = found, start
        value = best
        starts.append(first)
    cuts, end = [], units
    for first in reversed(starts):
        end = first[end]
        cuts.append(end)
    return value[units], tuple(reversed(cuts[:-1]))
