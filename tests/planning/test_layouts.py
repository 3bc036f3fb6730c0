"""Every refusal of a layout, with the parts of its message, and the layouts that must pass."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest

from hybrid_strategy.errors import ConfigError, LayoutError
from hybrid_strategy.planning.layouts import check_layout, resolve_layout
from hybrid_strategy.spec.batch import BatchSpec
from hybrid_strategy.spec.layout import Layout
from hybrid_strategy.spec.model_shape import ModelShape

SHAPE = ModelShape(64, 4, 8, 128, 97, 33, num_key_value_heads=2)

SIZES_REFUSED = [
    (
        {"world_size": 8, "tensor_parallel_size": 3},
        "tensor_parallel_size is 3: the product of the sizes must divide the number of processes. "
        "3 (tensor) = 3 does not divide 8. Set 1, 2, 4 or 8, or start 6 or 9 processes.",
    ),
    (
        {"world_size": 8, "tensor_parallel_size": 2, "data_parallel_size": 3},
        "data_parallel_size is 3: the sizes must multiply to the number of processes. "
        "2 (tensor) x 3 (data) = 6, not 8. Set 4, or start 6 processes.",
    ),
    (
        {"world_size": 8, "data_parallel_size": 4},
        "data_parallel_size is 4: the sizes must multiply to the number of processes. "
        "4 (data) = 4, not 8. Set 8, or start 4 processes.",
    ),
    (
        {"world_size": 1, "pipeline_parallel_size": 2},
        "pipeline_parallel_size is 2: the product of the sizes must divide the number of processes. "
        "2 (pipeline) = 2 does not divide 1. Set 1, or start 2 processes.",
    ),
    (
        {"world_size": 8, "tensor_parallel_size": 4, "pipeline_parallel_size": 4},
        "pipeline_parallel_size is 4: the product of the sizes must divide the number of processes. "
        "4 (pipeline) x 4 (tensor) = 16 does not divide 8. Set 1 or 2, or start 16 processes.",
    ),
    (
        {"world_size": 8, "tensor_parallel_size": 3, "pipeline_parallel_size": 3},
        "pipeline_parallel_size is 3: the product of the sizes must divide the number of processes. "
        "3 (pipeline) x 3 (tensor) = 9 does not divide 8. Set pipeline_parallel_size=2 and tensor_parallel_size=4, "
        "pipeline_parallel_size=4 and tensor_parallel_size=2 or pipeline_parallel_size=2 and tensor_parallel_size=2, "
        "or start 9 processes.",
    ),
    (
        {"world_size": 16384, "tensor_parallel_size": 12},
        "Set 2, 4, 8, 16, 32 or 64, or start 16380 or 16392 processes.",
    ),
    ({"world_size": 8, "tensor_parallel_size": 0}, "tensor_parallel_size is 0: it must be a whole number of 1 or more."),
    ({"world_size": 8, "tensor_parallel_size": -1}, "tensor_parallel_size is -1: it must be a whole number"),
    ({"world_size": 8, "tensor_parallel_size": "2"}, "tensor_parallel_size is '2': it must be a whole number"),
    ({"world_size": 8, "pipeline_parallel_size": 2.0}, "pipeline_parallel_size is 2.0: it must be a whole number"),
    ({"world_size": 8, "data_parallel_size": True}, "data_parallel_size is True: it must be a whole number"),
    (
        {"world_size": 8, "data_parallel_size": "all"},
        "data_parallel_size is 'all': it must be a whole number of 1 or more. Set 1",
    ),
    ({"world_size": 0}, "world_size is 0: it must be a whole number of 1 or more"),
    ({"world_size": 2, "stages_per_rank": 0}, "stages_per_rank is 0: it must be a whole number of 1 or more"),
    ({"world_size": 2, "sharding": "zero4"}, "sharding is 'zero4': there is no sharding of this name. Did you mean 'zero3'?"),
    (
        {"world_size": 2, "activation_checkpoint": "ful"},
        "activation_checkpoint is 'ful': there is no activation_checkpoint of this name. Did you mean 'full'? Known: none,",
    ),
    (
        {"world_size": 2, "sequence_parallel": True},
        "sequence_parallel is True: it splits activations over the tensor-parallel ranks, and would be ignored. "
        "tensor_parallel_size is 1. Set false, or tensor_parallel_size=2 or more.",
    ),
    (
        {"world_size": 2, "stages_per_rank": 2},
        "stages_per_rank is 2: it cuts the layers of each pipeline rank into stages, and would be ignored. "
        "pipeline_parallel_size is 1. Set 1, or pipeline_parallel_size=2 or more.",
    ),
    (
        {"world_size": 2, "pipeline_parallel_size": 2, "stages_per_rank": 2},
        "stages_per_rank is 2: the schedule 1F1B holds one stage a rank. 2 stages on each of 2 ranks were asked for. "
        "Set 1, or schedule=Interleaved1F1B.",
    ),
    (
        {"world_size": 2, "pipeline_parallel_size": 2, "stages_per_rank": 1, "schedule": "LoopedBFS"},
        "stages_per_rank is 1: the schedule LoopedBFS needs two stages or more on each rank.",
    ),
    (
        {"world_size": 2, "pipeline_parallel_size": 2, "stages_per_rank": 3, "schedule": "zbvzerobubble"},
        "stages_per_rank is 3: the schedule ZBVZeroBubble places exactly two stages on each rank, as a V. "
        "3 on each of 2 ranks were asked for. Set 2.",
    ),
    (
        {"world_size": 8, "data_parallel_replicate_size": 2},
        "data_parallel_replicate_size is 2: every rank is a replica under ddp, so it would be ignored. data_parallel_size is 8.",
    ),
    (
        {"world_size": 8, "data_parallel_replicate_size": 3, "sharding": "zero1"},
        "data_parallel_replicate_size is 3: it must divide data_parallel_size. 3 does not divide 8. Set 1, 2 or 4.",
    ),
    (
        {"world_size": 8, "data_parallel_replicate_size": 8, "sharding": "zero2"},
        "data_parallel_replicate_size is 8: with as many replicas as data-parallel ranks zero2 shards nothing. "
        "8 / 8 = 1 rank to shard over. Set 1, 2 or 4, or sharding=ddp.",
    ),
]


@pytest.mark.parametrize(("settings", "part"), SIZES_REFUSED, ids=lambda value: "" if isinstance(value, str) else str(value))
def test_sizes_that_are_refused(settings: dict[str, Any], part: str) -> None:
    with pytest.raises(LayoutError) as error:
        resolve_layout(**settings)
    assert part in str(error.value)


MODEL_REFUSED = [
    (
        {"world_size": 8, "tensor_parallel_size": 4},
        {"shape": SHAPE},
        "tensor_parallel_size is 4: it must divide num_key_value_heads. 4 does not divide 2; 1 or 2 would. "
        "Set 1 or 2 (8 processes, pipeline_parallel_size 1).",
    ),
    (
        {"world_size": 3, "tensor_parallel_size": 3},
        {"shape": SHAPE},
        "tensor_parallel_size is 3: it must divide num_attention_heads. 3 does not divide 8; 1, 2, 4 or 8 would. Set 1 (3 proc",
    ),
    (
        {"world_size": 2, "tensor_parallel_size": 2},
        {"heads": {"n_head": 3}},
        "tensor_parallel_size is 2: it must divide n_head. 2 does not divide 3; 1 or 3 would. Set 1 (2 processes",
    ),
    (
        {"world_size": 16, "tensor_parallel_size": 16},
        {"gpus_per_node": 8},
        "tensor_parallel_size is 16: a tensor-parallel group must stay inside one node, since it communicates in every layer. "
        "groups of 16 do not fit evenly into nodes of 8. Set 1, 2, 4 or 8.",
    ),
    ({"world_size": 24, "tensor_parallel_size": 3}, {"gpus_per_node": 8}, "groups of 3 do not fit evenly into nodes of 8."),
    (
        {"world_size": 16, "tensor_parallel_size": 16},
        {"gpus_per_node": 8, "heads": {"n_head": 12}},
        "tensor_parallel_size is 16: it must divide n_head. 16 does not divide 12; 1, 2, 3, 4, 6 or 12 would. Set 1, 2 or 4 (16",
    ),
    (
        {"world_size": 2, "tensor_parallel_size": 2, "sequence_parallel": True},
        {"shape": SHAPE},
        "sequence_length is 33: sequence_parallel splits it evenly over the tensor-parallel ranks. 2 does not divide 33. "
        "Set 32 or 34, or sequence_parallel=false.",
    ),
    (
        {"world_size": 4, "context_parallel_size": 4},
        {"shape": replace(SHAPE, sequence_length=36)},
        "sequence_length is 36: context_parallel_size cuts it into two equal chunks a rank. 2 x 4 (context) = 8 does not divide "
        "36. Set 32 or 40, or context_parallel_size=1.",
    ),
    (
        {"world_size": 8, "context_parallel_size": 2, "tensor_parallel_size": 4, "sequence_parallel": True},
        {"shape": replace(SHAPE, sequence_length=36, num_key_value_heads=4)},
        "sequence_length is 36: sequence_parallel splits it evenly over the tensor-parallel ranks. 4 (tensor) x 2 (context) = 8 "
        "does not divide 36. Set 32 or 40, or sequence_parallel=false.",
    ),
    (
        {"world_size": 8, "pipeline_parallel_size": 8},
        {"shape": SHAPE},
        "pipeline_parallel_size is 8: every stage needs a layer of its own. 8 ranks x 1 stage = 8 stages for 4 layers. "
        "Set 1, 2 or 4.",
    ),
    (
        {"world_size": 6, "pipeline_parallel_size": 2, "schedule": "LoopedBFS", "stages_per_rank": 3},
        {"shape": SHAPE},
        "stages_per_rank is 3: every stage needs a layer of its own. 2 ranks x 3 stages = 6 stages for 4 layers. Set 2.",
    ),
    (
        {"world_size": 3, "pipeline_parallel_size": 3, "schedule": "ZBVZeroBubble"},
        {"num_units": 5},
        "pipeline_parallel_size is 3: every stage needs a layer of its own. 3 ranks x 2 stages = 6 stages for 5 layers. Set 1.",
    ),
    (
        {"world_size": 2, "pipeline_parallel_size": 2, "schedule": "ZBVZeroBubble"},
        {"num_units": 1},
        "2 ranks x 2 stages = 4 stages for 1 layer, and one that the model calls several times lies on one rank. Set 1.",
    ),
    (
        {"world_size": 2, "pipeline_parallel_size": 2},
        {"num_units": 1},
        "2 ranks x 1 stage = 2 stages for 1 layer, and one that the model calls several times lies on one rank. Set 1.",
    ),
    ({"world_size": 3, "pipeline_parallel_size": 3}, {"num_units": 2}, "3 stages for 2 layers. Set 1."),
    (
        {"world_size": 4},
        {"batch": BatchSpec(10)},
        "global_batch_size is 10: data_parallel_size x accumulate_grad_batches must divide it. ",
    ),
    (
        {"world_size": 4},
        {"batch": BatchSpec(8, num_microbatches=3)},
        "num_microbatches is 3: a micro-batch must have a row, and a data-parallel rank's batch has fewer rows than that. ",
    ),
    ({"world_size": 4}, {"batch": BatchSpec(8, num_microbatches=0)}, "num_microbatches is 0: it must be a whole number of 1"),
]


@pytest.mark.parametrize(("settings", "given", "part"), MODEL_REFUSED, ids=range(len(MODEL_REFUSED)))
def test_layouts_that_a_model_a_batch_or_a_node_refuses(settings: dict[str, Any], given: dict[str, Any], part: str) -> None:
    layout = resolve_layout(**settings)
    with pytest.raises(LayoutError) as error:
        check_layout(layout, **given)
    assert part in str(error.value)


NOT_YET = [
    *(
        (
            {"world_size": 4, "pipeline_parallel_size": 2, "schedule": schedule, "compile": True},
            f"compile is True: it cannot be combined with the schedule {schedule}. ",
        )
        for schedule in ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
    ),
    ({"world_size": 2, "context_parallel_size": 2, "compile": True}, "compile is True: it cannot be combined with context"),
]


@pytest.mark.parametrize(("settings", "part"), NOT_YET)
def test_what_is_not_available_yet(settings: dict[str, Any], part: str) -> None:
    with pytest.raises(LayoutError) as error:
        resolve_layout(**settings)
    assert part in str(error.value)


@pytest.mark.parametrize("word", ["interleved1f1b", "Interleaved1F1", "interleaved"])
def test_unknown_schedule_gets_the_nearest_name(word: str) -> None:
    with pytest.raises(ConfigError, match=r"Did you mean 'Interleaved1F1B'\? Known: .*GPipe") as error:
        resolve_layout(world_size=2, schedule=word)
    assert str(error.value).startswith(f"schedule is '{word}': ")


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"world_size": 1}, "single"),
        ({"world_size": 4, "pipeline_parallel_size": 2, "sharding": "zero3", "schedule": "DualPipeV"}, "dp2_pp2_zero3"),
        ({"world_size": 1, "sharding": "zero1"}, "zero1"),
        ({"world_size": 1, "sharding": "zero3", "schedule": "ZBVZeroBubble"}, "zero3"),
        ({"world_size": 8}, "dp8"),
        ({"world_size": 8, "data_parallel_size": 2, "tensor_parallel_size": 2, "pipeline_parallel_size": 2}, "dp2_tp2_pp2"),
        ({"world_size": 6, "pipeline_parallel_size": 3, "sharding": "zero2"}, "dp2_pp3_zero2"),
        ({"world_size": 16384, "tensor_parallel_size": 8, "pipeline_parallel_size": 16}, "dp128_tp8_pp16"),
    ],
)
def test_layouts_that_pass(settings: dict[str, Any], name: str) -> None:
    layout = resolve_layout(**settings)
    assert layout.world_size == settings["world_size"]
    assert layout.name == name


def test_a_schedule_brings_its_spelling_and_its_stages() -> None:
    layout = resolve_layout(world_size=4, pipeline_parallel_size=4, schedule="INTERLEAVED1f1b")
    assert (layout.schedule, layout.stages_per_rank) == ("Interleaved1F1B", 2)
    assert resolve_layout(world_size=4, schedule="interleaved1f1b").stages_per_rank == 1


def test_uneven_vocabulary_and_a_small_world_on_a_large_node_pass() -> None:
    check_layout(resolve_layout(world_size=2, tensor_parallel_size=2), shape=SHAPE)
    check_layout(resolve_layout(world_size=3, tensor_parallel_size=3), gpus_per_node=8)
    check_layout(resolve_layout(world_size=64, tensor_parallel_size=4), gpus_per_node=8)


def test_a_layout_that_was_not_resolved_is_checked_as_well() -> None:
    with pytest.raises(LayoutError, match="tensor_parallel_size is 0"):
        check_layout(Layout(tensor_parallel_size=0))
    with pytest.raises(ConfigError, match="schedule is 'none'"):
        check_layout(Layout(schedule="none"))


def test_fewer_micro_batches_than_stages_run() -> None:
    for schedule in ("GPipe", "1F1B", "Interleaved1F1B", "ZBVZeroBubble"):
        layout = resolve_layout(world_size=4, pipeline_parallel_size=4, schedule=schedule)
        check_layout(layout, batch=BatchSpec(1, num_microbatches=1))


def test_refusing_takes_no_time_for_a_large_and_awkward_world() -> None:
    start = time.process_time()
    with pytest.raises(LayoutError, match="or start 346500 processes"):
        resolve_layout(
            world_size=15120,
            tensor_parallel_size=11,
            pipeline_parallel_size=9,
            context_parallel_size=35,
            data_parallel_size=100,
        )
    assert time.process_time() - start < 2
