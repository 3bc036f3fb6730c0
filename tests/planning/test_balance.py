from __future__ import annotations

import time
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_strategy.errors import LayoutError
from hybrid_strategy.planning.balance import balance, check_cuts, cut_units, layer_like, unit_costs, unit_names
from hybrid_strategy.spec.model_shape import ModelShape

LLAMA_8B = ModelShape(4096, 32, 32, 14336, 128256, 8192, num_key_value_heads=8)


def stages(costs: list[float], cuts: tuple[int, ...]) -> list[list[float]]:
    return [costs[first:last] for first, last in pairwise((0, *cuts, len(costs)))]


def score(costs: list[float], cuts: tuple[int, ...]) -> tuple[float, float]:
    sums = [sum(stage) for stage in stages(costs, cuts)]
    return max(sums), sum(each * each for each in sums)


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[float], list[bool], int]:
    size = draw(st.integers(1, 9))
    costs = [float(draw(st.integers(0, 12))) for _ in range(size)]
    layers = [draw(st.booleans()) for _ in range(size)]
    layers[draw(st.integers(0, size - 1))] = True
    return costs, layers, draw(st.integers(1, sum(layers)))


@given(problems())
@settings(max_examples=300)
def test_as_good_as_every_other_cut(problem: tuple[list[float], list[bool], int]) -> None:
    costs, layers, num_stages = problem
    cuts = balance(costs, num_stages, layers)
    every = [
        each
        for each in combinations(range(1, len(costs)), num_stages - 1)
        if all(any(layers[first:last]) for first, last in pairwise((0, *each, len(costs))))
    ]
    assert cuts in every
    assert score(costs, cuts) == min(score(costs, each) for each in every)


@given(st.integers(1, 40), st.data())
def test_every_unit_once_and_in_order(num_layers: int, data: st.DataObject) -> None:
    num_stages = data.draw(st.integers(1, num_layers))
    units = ("embed_tokens", *(f"layers.{index}" for index in range(num_layers)), "norm", "lm_head")
    cut = cut_units(units, num_stages)
    assert len(cut) == num_stages
    assert tuple(unit for stage in cut for unit in stage) == units
    sizes = [sum(layer_like(stage)) for stage in cut]
    assert min(sizes) >= 1
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes), "the first stages hold the most activations"


@pytest.mark.parametrize("num_layers", [3, 5, 7, 10, 30])
@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_no_layer_is_lost_when_layers_do_not_divide(num_layers: int, num_stages: int) -> None:
    shape = ModelShape(64, num_layers, 4, 128, 512, 32)
    if num_stages > num_layers:
        with pytest.raises(LayoutError, match=f"4 stages for {num_layers} layers"):
            cut_units(unit_names(shape), num_stages, unit_costs(shape))
        return
    cut = cut_units(unit_names(shape), num_stages, unit_costs(shape))
    assert tuple(unit for stage in cut for unit in stage) == unit_names(shape)


def test_the_head_and_the_embedding_are_weighed_in() -> None:
    cut = cut_units(unit_names(LLAMA_8B), 4, unit_costs(LLAMA_8B))
    assert [sum(layer_like(stage)) for stage in cut] == [8, 9, 9, 6]
    costs = unit_costs(LLAMA_8B)
    even = (9, 17, 25)
    assert score(costs, balance(costs, 4, layer_like(unit_names(LLAMA_8B))))[0] < score(costs, even)[0]


def test_the_norm_stays_with_the_last_layer() -> None:
    for num_stages in range(1, 33):
        cut = cut_units(unit_names(LLAMA_8B), num_stages, unit_costs(LLAMA_8B))
        assert cut[-1][-3:] == ("layers.31", "norm", "lm_head")
        assert cut[0][:2] == ("embed_tokens", "layers.0")


def test_explicit_cuts() -> None:
    units = unit_names(ModelShape(8, 4, 1, 8, 8, 8))
    assert [len(stage) for stage in cut_units(units, 2, stage_cuts=[2])] == [2, 5]
    for cuts, part in (
        ([], "one cut fewer than stages is needed. 0 cuts for 2 stages"),
        ([2, 3], "2 cuts for 2 stages"),
        ([0], "the cuts must rise and leave no stage empty. The model has 7 units"),
        ([7], "the cuts must rise"),
        ([1], "every stage needs a layer of its own. Stage 0 has the units 0 to 0, none of them a layer"),
        ([5], "Stage 1 has the units 5 to 6, none of them a layer"),
    ):
        with pytest.raises(LayoutError) as error:
            check_cuts(cuts, 2, layer_like(units))
        assert part in str(error.value)
        assert str(error.value).startswith(f"stage_cuts is {cuts}: ")


def test_more_stages_than_layers() -> None:
    with pytest.raises(LayoutError, match=r"pipeline_parallel_size is 5: every stage needs .* Set 1, 2, 3 or 4\."):
        balance([1.0] * 4, 5)


def test_the_deepest_model_takes_no_time() -> None:
    shape = ModelShape(16384, 126, 128, 53248, 128256, 8192, num_key_value_heads=8)
    start = time.process_time()
    for num_stages in (2, 16, 63, 126):
        balance(unit_costs(shape), num_stages, layer_like(unit_names(shape)))
    assert time.process_time() - start < 3
