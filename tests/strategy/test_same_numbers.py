"""Every layout gives the loss, the gradients, the weights and the logged values of one process, at every step."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tests.support.training import SHAPE, Case, compare, train

SGD = {"optimizer": "sgd"}
STEPS = 10  # benchmarks/parity.py does 20
GLOBAL_BATCH = 16
PIPELINE = {"pipeline_parallel_size": 2, "num_microbatches": 4}

# name -> (processes, data-parallel size, strategy arguments)
LAYOUTS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "dp2_ddp": (2, 2, {}),
    "dp2_zero1": (2, 2, {"sharding": "zero1"}),
    "dp2_zero2": (2, 2, {"sharding": "zero2"}),
    "dp2_zero3": (2, 2, {"sharding": "zero3"}),
    "tp2": (2, 1, {"tensor_parallel_size": 2}),
    "tp2_sequence_parallel": (2, 1, {"tensor_parallel_size": 2, "sequence_parallel": True}),
    "pp2_sequential": (2, 1, {**PIPELINE, "schedule": "sequential"}),
    "pp2_gpipe": (2, 1, {**PIPELINE, "schedule": "GPipe"}),
    "pp2_1f1b": (2, 1, {**PIPELINE, "schedule": "1F1B"}),
    "pp2_interleaved": (2, 1, {**PIPELINE, "schedule": "Interleaved1F1B"}),
    "pp2_looped_bfs": (2, 1, {**PIPELINE, "schedule": "LoopedBFS"}),
    "pp2_interleaved_zero_bubble": (2, 1, {**PIPELINE, "schedule": "InterleavedZeroBubble"}),
    "pp2_zbv": (2, 1, {**PIPELINE, "schedule": "ZBVZeroBubble"}),
    "pp2_dualpipev": (2, 1, {**PIPELINE, "schedule": "DualPipeV"}),
    "dp2_pp2_ddp": (4, 2, {**PIPELINE}),
    "dp2_pp2_zero2": (4, 2, {**PIPELINE, "sharding": "zero2"}),
    "dp2_pp2_zero3": (4, 2, {**PIPELINE, "sharding": "zero3"}),
    "dp2_pp2_zbv_zero1": (4, 2, {**PIPELINE, "schedule": "ZBVZeroBubble", "sharding": "zero1"}),
    "dp2_pp2_zbv_zero3": (4, 2, {**PIPELINE, "schedule": "ZBVZeroBubble", "sharding": "zero3"}),
    "dp2_tp2": (4, 2, {"tensor_parallel_size": 2}),
    "dp2_tp2_zero3": (4, 2, {"tensor_parallel_size": 2, "sharding": "zero3", "sequence_parallel": True}),
    "tp2_pp2": (4, 1, {**PIPELINE, "tensor_parallel_size": 2}),
    "dp4_hybrid_sharding": (4, 4, {"sharding": "zero2", "data_parallel_replicate_size": 2}),
    "dp4_hybrid_sharding_zero3": (4, 4, {"sharding": "zero3", "data_parallel_replicate_size": 2}),
    "dp2_tp2_pp2": (8, 2, {**PIPELINE, "tensor_parallel_size": 2, "sequence_parallel": True, "sharding": "zero1"}),
}


@pytest.fixture(scope="module")
def reference() -> list[dict[str, Any]]:
    return train(Case(batch_size=GLOBAL_BATCH, steps=STEPS), 1)


@pytest.mark.parametrize("name", LAYOUTS)
def test_same_numbers_as_one_process(name: str, reference: list[dict[str, Any]]) -> None:
    world_size, data_parallel_size, arguments = LAYOUTS[name]
    case = Case(strategy=arguments, batch_size=GLOBAL_BATCH // data_parallel_size, steps=STEPS)
    compare(reference, train(case, world_size))


RECOMPUTED = [
    *((name, kind) for name in ("dp2_zero3", "tp2_sequence_parallel", "pp2_1f1b") for kind in ("selective", "full")),
    ("pp2_interleaved_zero_bubble", "full"),
    ("pp2_zbv", "selective"),
    ("dp2_pp2_zbv_zero3", "selective"),
]


@pytest.mark.parametrize(("name", "kind"), RECOMPUTED)
def test_recomputation_changes_no_number(name: str, kind: str, reference: list[dict[str, Any]]) -> None:
    world_size, data_parallel_size, arguments = LAYOUTS[name]
    strategy = {**arguments, "activation_checkpoint": kind}
    case = Case(strategy=strategy, batch_size=GLOBAL_BATCH // data_parallel_size, steps=3)
    short = [{**record, "steps": record["steps"][:3]} for record in reference]
    compare(short, train(case, world_size))


CLIPPED = ["dp2_zero1", "dp2_zero3", "tp2_sequence_parallel", "pp2_1f1b", "tp2_pp2", "dp4_hybrid_sharding"]


@pytest.mark.parametrize("name", CLIPPED)
@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_clipping_is_by_the_whole_model(name: str, algorithm: str) -> None:
    world_size, data_parallel_size, arguments = LAYOUTS[name]
    trainer = {"gradient_clip_val": 0.01 if algorithm == "norm" else 1e-3, "gradient_clip_algorithm": algorithm}
    reference = train(Case(batch_size=GLOBAL_BATCH, trainer=trainer, module_arguments=SGD), 1)
    case = Case(strategy=arguments, batch_size=GLOBAL_BATCH // data_parallel_size, trainer=trainer, module_arguments=SGD)
    compare(reference, train(case, world_size))


@pytest.mark.parametrize(
    "name", ["dp2_ddp", "dp2_zero1", "dp2_zero2", "dp2_zero3", "pp2_1f1b", "pp2_zbv", "dp2_pp2_zero2", "tp2_pp2"]
)
@pytest.mark.parametrize("batches", [2, 3])
def test_accumulated_batches_are_one_larger_batch(name: str, batches: int) -> None:
    world_size, data_parallel_size, arguments = LAYOUTS[name]
    trainer = {"accumulate_grad_batches": batches}
    reference = train(Case(batch_size=GLOBAL_BATCH, rows=96, trainer=trainer, steps=2, module_arguments=SGD), 1)
    case = Case(
        strategy=arguments, batch_size=GLOBAL_BATCH // data_parallel_size, rows=96, trainer=trainer, steps=2, module_arguments=SGD
    )
    compare(reference, train(case, world_size))


@pytest.mark.parametrize("rows", [18, 23, 31])
@pytest.mark.parametrize("name", ["dp2_ddp", "dp2_zero3", "pp2_gpipe", "pp2_1f1b", "pp2_interleaved", "pp2_zbv", "dp2_pp2_zero2"])
def test_the_short_last_batch_counts_by_its_rows(name: str, rows: int) -> None:
    world_size, data_parallel_size, arguments = LAYOUTS[name]
    reference = train(Case(batch_size=GLOBAL_BATCH, rows=rows, steps=2, module_arguments=SGD), 1)
    case = Case(strategy=arguments, batch_size=GLOBAL_BATCH // data_parallel_size, rows=rows, steps=2, module_arguments=SGD)
    compare(reference, train(case, world_size))


TIED = [
    "dp2_zero3",
    "tp2_sequence_parallel",
    "pp2_1f1b",
    "pp2_interleaved",
    "pp2_zbv",
    "dp2_pp2_zero2",
    "dp2_pp2_zero3",
    "tp2_pp2",
]


@pytest.mark.parametrize("name", TIED)
def test_tied_embeddings_stay_one_parameter(name: str) -> None:
    """The replicas on the first and the last stage are compared bit by bit when the pieces of all ranks are put together."""
    world_size, data_parallel_size, arguments = LAYOUTS[name]
    shape = dataclasses.replace(SHAPE, tied_embeddings=True)
    trainer = {"gradient_clip_val": 0.05}
    reference = train(Case(batch_size=GLOBAL_BATCH, shape=shape, trainer=trainer, steps=5), 1)
    case = Case(strategy=arguments, batch_size=GLOBAL_BATCH // data_parallel_size, shape=shape, trainer=trainer, steps=5)
    compare(reference, train(case, world_size))
