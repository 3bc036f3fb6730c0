"""The gate says `same` where layouts are right, and names the fault where one is planted."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
from torch.utils.data import DataLoader

from tests.parity import faults
from tests.support.gate import gate
from tests.support.training import SHAPE, TinyLM, Tokens

PIPELINE = {"pipeline_parallel_size": 2, "num_microbatches": 4}
SEQUENCE = {"tensor_parallel_size": 2, "sequence_parallel": True}
MODULE = partial(TinyLM, SHAPE)
SGD = partial(TinyLM, SHAPE, "sgd")
QUANTITIES = {"initial weights", "loss", "gradient norm", "gradients", "weights after the step"}


def _data(rows: int = 64, batch_size: int = 8) -> DataLoader[Any]:
    return DataLoader(Tokens(rows), batch_size=batch_size, shuffle=True)


SAME: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "one_process": (1, {"num_microbatches": 3}, {}),
    "dp2": (2, {}, {}),
    "dp2_zero1_accumulated": (2, {"sharding": "zero1"}, {"accumulate_grad_batches": 3}),
    "dp2_zero3_clipped": (2, {"sharding": "zero3"}, {"gradient_clip_val": 0.05}),
    "tp2_sequence_parallel": (2, SEQUENCE, {}),
    "tp2_clipped_by_value": (2, {"tensor_parallel_size": 2}, {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"}),
    "pp2": (2, PIPELINE, {}),
    "pp2_zero_bubble": (2, {**PIPELINE, "schedule": "ZBVZeroBubble"}, {}),
    "dp2_pp2_zero2": (4, {**PIPELINE, "sharding": "zero2"}, {}),
    "tp2_bf16_mixed": (2, {"tensor_parallel_size": 2}, {"precision": "bf16-mixed"}),
    "pp2_bf16_true": (2, PIPELINE, {"precision": "bf16-true"}),
    "dp2_fp64_clipped": (2, {}, {"precision": "64-true", "gradient_clip_val": 0.05}),
}


@pytest.mark.parametrize("name", SAME)
def test_a_right_layout_is_the_same(name: str) -> None:
    devices, strategy, trainer = SAME[name]
    report = gate(MODULE, _data(), strategy, devices=devices, trainer=trainer, steps=3)
    assert report.same, str(report)
    assert report.steps == 3
    assert report.num_tensors == 39
    assert {row.quantity for row in report.rows} >= QUANTITIES


def test_a_short_last_batch_that_does_not_divide_is_the_same() -> None:
    report = gate(MODULE, _data(rows=21), {**PIPELINE, "data_parallel_size": 2}, devices=4, steps=4)
    assert report.same, str(report)


@dataclass(frozen=True)
class Planted:
    """A fault, where it is planted, what should differ first, and words of the diagnosis."""

    fault: Any
    strategy: dict[str, Any]
    quantity: str
    words: tuple[str, ...]
    step: int = 1
    devices: int = 2
    trainer: dict[str, Any] = field(default_factory=dict)


NORM, LOSS, INITIAL, AFTER = "gradient norm", "loss", "initial weights", "weights after the step"
MENDED = "their sum is right, so an all-reduce over the"
PLANTED = {
    "micro-batches summed": Planted(faults.Scaled(4), PIPELINE, NORM, ("scaled: all gradients are x 4, x num_microbatches (4)",)),
    "micro-batches averaged twice": Planted(faults.Scaled(0.25), PIPELINE, NORM, ("/ num_microbatches (4)",)),
    "data ranks summed": Planted(
        faults.Scaled(2), {"sharding": "zero1"}, NORM, ("scaled: all gradients are x 2, x data_parallel_size (2)",)
    ),
    "accumulated batches summed": Planted(
        faults.Scaled(3),
        {"sharding": "zero3"},
        NORM,
        ("x accumulate_grad_batches (3)",),
        trainer={"accumulate_grad_batches": 3},
    ),
    "two means forgotten": Planted(
        faults.Scaled(12), PIPELINE, NORM, ("x num_microbatches x accumulate_grad",), trainer={"accumulate_grad_batches": 3}
    ),
    "half precision": Planted(faults.Scaled(2), {}, NORM, ("x data_parallel_size (2)",), trainer={"precision": "bf16-mixed"}),
    "loss summed": Planted(faults.ScaledLoss(4), PIPELINE, LOSS, ("scaled: the loss is x num_microbatches (4)",)),
    "norm not reduced over tensor ranks": Planted(
        faults.no_sum_over_tensor_ranks,
        SEQUENCE,
        NORM,
        ("unsynchronised replica: tensor-parallel ranks hold different gradients of", "layernorm.weight", MENDED),
    ),
    "nothing reduced over data ranks": Planted(
        faults.no_sum_over_data_ranks, {}, NORM, ("unsynchronised replica: data-parallel ranks hold", MENDED)
    ),
    "one tensor not reduced": Planted(
        faults.no_sum_of_one_tensor, {}, NORM, ("gradients of model.layers.0.mlp.gate_proj.weight;", MENDED)
    ),
    "layer dropped": Planted(
        faults.dropped_layer, PIPELINE, INITIAL, ("absent: model.layers.3.", "on any rank", "left out"), step=0
    ),
    "layer idle": Planted(
        faults.idle_layer, {}, LOSS, ("absent: model.layers.1.", "no gradients", "took no part in the step"), devices=1
    ),
    "rows of one rank moved": Planted(
        faults.perturbed,
        {"sharding": "zero1"},
        AFTER,
        ("part of the ranks: the weights after the step of model.layers.0.self_attn.v_proj.weight are wrong on rank 1 only",),
    ),
    "copy of one rank moved": Planted(
        faults.perturbed, {}, AFTER, ("unsynchronised replica: data-parallel ranks", "wrong on rank 1 only")
    ),
    "one rank starts elsewhere": Planted(
        faults.perturbed_at_the_start,
        {},
        INITIAL,
        ("unsynchronised replica: data-parallel ranks", "model.embed_tokens.weight; wrong on rank 1 only"),
        step=0,
    ),
    "two owners": Planted(faults.two_owners, {}, "owners of the pieces", ("have 2 owners", "counted in the norm once"), step=0),
    "norm by stage": Planted(
        faults.local_norm,
        PIPELINE,
        "clipped gradients",
        ("scaled: the clipped gradients of",),
        trainer={"gradient_clip_val": 0.01},
    ),
    "samples by world size": Planted(
        faults.samples_by_world_size,
        {"tensor_parallel_size": 2},
        LOSS,
        ("samples: rank 1 reads other samples than its tensor and pipeline peers",),
    ),
    "samples not divided": Planted(
        faults.every_rank_reads_the_same, {}, LOSS, ("samples: 8 of the 16 rows", "8 by more than one")
    ),
    "optimizer faster": Planted(faults.faster_optimizer, {}, AFTER, ("scaled: all weights after the step are x 2",)),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_named(name: str) -> None:
    planted = PLANTED[name]
    report = gate(SGD, _data(), planted.strategy, devices=planted.devices, trainer=planted.trainer, steps=2, plant=planted.fault)
    assert not report.same
    assert report.first is not None
    assert (report.first.quantity, report.first.step) == (planted.quantity, planted.step), str(report)
    text = "\n".join(report.diagnoses)
    for each in planted.words:
        assert each in text, text
