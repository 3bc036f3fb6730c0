from __future__ import annotations

import json
import time
from itertools import product

import pytest

from hybrid_strategy.errors import LayoutError
from hybrid_strategy.planning.build_plan import Decisions, build_plan, rank_map
from hybrid_strategy.planning.layouts import resolve_layout
from hybrid_strategy.planning.parameters import Parameter, Unit, count_parameters, decoder_units
from hybrid_strategy.spec.batch import BatchSpec
from hybrid_strategy.spec.layout import MESH_AXES, Layout
from hybrid_strategy.spec.model_shape import ModelShape
from hybrid_strategy.spec.training import LearningRateSpec, OptimizerSpec

LLAMA = ModelShape(64, 6, 8, 172, 515, 32, num_key_value_heads=4)
GPT = ModelShape(64, 6, 8, 256, 515, 32, family="gpt", gated_mlp=False, tied_embeddings=True, bias=True, learned_positions=True)
BATCH = BatchSpec(16, num_microbatches=4)


@pytest.mark.parametrize("shape", [LLAMA, GPT], ids=["llama", "gpt"])
def test_units_hold_every_parameter_once(shape: ModelShape) -> None:
    units = decoder_units(shape)
    assert count_parameters(units) == shape.num_parameters
    assert {unit.num_parameters for unit in units if unit.name.startswith("layers.")} == {shape.layer_parameters}


@pytest.mark.parametrize(("tensor", "pipeline"), list(product((1, 2, 4), (1, 2, 3))))
def test_ranks_hold_the_whole_model_and_norms_once_a_tensor_rank(tensor: int, pipeline: int) -> None:
    plan = build_plan(
        resolve_layout(world_size=tensor * pipeline, tensor_parallel_size=tensor, pipeline_parallel_size=pipeline), BATCH, LLAMA
    )
    norms = LLAMA.num_layers * 2 * 64 + 64
    assert sum(plan.rank_parameters) == LLAMA.num_parameters + (tensor - 1) * norms


def test_an_uneven_vocabulary_is_split_unevenly() -> None:
    plan = build_plan(resolve_layout(world_size=2, tensor_parallel_size=2), BATCH, LLAMA)
    assert plan.rank_parameters[0] - plan.rank_parameters[1] == 2 * 64


def test_zero3_shards_parameters_and_the_others_do_not() -> None:
    def held(sharding: str, replicate: int = 1) -> tuple[int, ...]:
        layout = resolve_layout(world_size=4, sharding=sharding, data_parallel_replicate_size=replicate)
        return build_plan(layout, BATCH, LLAMA).rank_parameters

    assert held("ddp") == held("zero1") == held("zero2") == (LLAMA.num_parameters,) * 4
    assert sum(held("zero3")) == LLAMA.num_parameters
    assert max(held("zero3")) - min(held("zero3")) <= 64 * (515 % 4)
    assert sum(held("zero3", replicate=2)) == 2 * LLAMA.num_parameters


def test_a_tied_head_is_held_where_it_is_used_and_counted_once() -> None:
    one = build_plan(Layout(), BATCH, GPT)
    assert one.rank_parameters == (one.num_parameters,) == (GPT.num_parameters,)
    two = build_plan(Layout(pipeline_parallel_size=2), BATCH, GPT)
    assert sum(two.rank_parameters) == GPT.num_parameters + 515 * 64
    both_ends = build_plan(resolve_layout(world_size=2, pipeline_parallel_size=2, schedule="ZBVZeroBubble"), BATCH, GPT)
    assert sum(both_ends.rank_parameters) == GPT.num_parameters, "the first and the last stage share a rank"


def test_stages_and_figures_of_the_schedule() -> None:
    layout = resolve_layout(world_size=2, pipeline_parallel_size=2, schedule="Interleaved1F1B")
    plan = build_plan(layout, BATCH, LLAMA)
    assert len(plan.stage_units) == 4
    assert tuple(unit for stage in plan.stage_units for unit in stage) == tuple(unit.name for unit in decoder_units(LLAMA))
    assert plan.bubble_fraction == 1 / 9
    assert plan.extra == {"stage_ranks": [0, 1, 0, 1], "max_in_flight": [5, 3]}
    assert json.loads(json.dumps(plan.to_dict()))["layout"]["schedule"] == "Interleaved1F1B"


def test_explicit_cuts_and_units_of_any_model() -> None:
    units = [Unit(f"blocks.{index}", {f"blocks.{index}.weight": Parameter((8, 4), split=0)}) for index in range(4)]
    layout = Layout(pipeline_parallel_size=2)
    assert build_plan(layout, BATCH, units).rank_parameters == (64, 64)
    assert build_plan(layout, BATCH, units, Decisions(stage_cuts=(1,))).rank_parameters == (32, 96)
    with pytest.raises(LayoutError, match="stage_cuts is"):
        build_plan(layout, BATCH, units, Decisions(stage_cuts=(0,)))
    with pytest.raises(LayoutError, match="5 stages for 4 layers"):
        build_plan(Layout(pipeline_parallel_size=5), BATCH, units)


def test_learning_rate() -> None:
    scaling = LearningRateSpec(scaling="auto", base_batch_size=4)
    assert build_plan(Layout(), BATCH, LLAMA).learning_rate is None
    assert build_plan(Layout(), BATCH, LLAMA, Decisions(OptimizerSpec(learning_rate=1.0))).learning_rate == 1.0
    assert build_plan(Layout(), BATCH, LLAMA, Decisions(OptimizerSpec(learning_rate=1.0), scaling)).learning_rate == 2.0
    for layout in (Layout(data_parallel_size=2), Layout(tensor_parallel_size=2), Layout(pipeline_parallel_size=2)):
        assert build_plan(layout, BATCH, LLAMA, Decisions(OptimizerSpec(learning_rate=1.0), scaling)).learning_rate == 2.0


def test_rank_map_has_every_rank_once() -> None:
    layout = resolve_layout(world_size=8, tensor_parallel_size=2, pipeline_parallel_size=2)
    rows = rank_map(layout, build_plan(layout, BATCH, LLAMA).rank_parameters)
    assert [row["rank"] for row in rows] == list(range(8))
    places = {tuple(row[axis] for axis in MESH_AXES) for row in rows}
    assert places == {(stage, data, 0, 0, tensor) for stage, data, tensor in product((0, 1), repeat=3)}
    assert [row["stages"] for row in rows] == ["0"] * 4 + ["1"] * 4
    assert "parameters" not in rank_map(layout)[0]


def test_the_largest_run_is_planned_at_once() -> None:
    shape = ModelShape(16384, 126, 128, 53248, 128256, 8192, num_key_value_heads=8)
    layout = resolve_layout(world_size=16384, tensor_parallel_size=8, pipeline_parallel_size=16, sharding="zero3")
    start = time.process_time()
    plan = build_plan(layout, BatchSpec(2048, num_microbatches=16), shape)
    assert time.process_time() - start < 3
    assert plan.num_parameters == shape.num_parameters == 405_853_388_800
    assert len(plan.rank_parameters) == 16384
