"""A rank of a world that is not there, counted, beside ledger and bill: a sample of benchmarks/dry_run.py."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace

import pytest

from hybrid_strategy.cli.main import main
from hybrid_strategy.measure.beside import RankComparison, compare_ranks
from hybrid_strategy.planning.numerics import numerics_of
from hybrid_strategy.planning.scenario import Scenario
from hybrid_strategy.spec.batch import BatchSpec
from hybrid_strategy.spec.layout import Layout
from hybrid_strategy.spec.model_shape import ModelShape
from hybrid_strategy.spec.training import OptimizerSpec

SHAPE = ModelShape(256, 4, 8, 704, 2048, 128, num_key_value_heads=4)
LAYOUTS = (
    (Layout(), "32-true", 0),
    (Layout(data_parallel_size=4, tensor_parallel_size=2), "bf16-mixed", 3),
    (Layout(tensor_parallel_size=2, sequence_parallel=True, activation_checkpoint="selective"), "bf16-mixed", 1),
    (Layout(data_parallel_size=4, sharding="zero3", activation_checkpoint="full"), "bf16-true", 2),
    (Layout(data_parallel_size=4, data_parallel_replicate_size=2, sharding="zero3"), "32-true", 2),
    (Layout(data_parallel_size=4, pipeline_parallel_size=2, sharding="zero2"), "32-true", 7),
    (Layout(pipeline_parallel_size=2, stages_per_rank=2, schedule="Interleaved1F1B", tensor_parallel_size=2), "32-true", 0),
    (Layout(data_parallel_size=2, pipeline_parallel_size=4, schedule="GPipe"), "32-true", 3),
    (Layout(pipeline_parallel_size=2, stages_per_rank=2, schedule="ZBVZeroBubble", activation_checkpoint="full"), "32-true", 1),
    (Layout(pipeline_parallel_size=2, stages_per_rank=2, schedule="InterleavedZeroBubble"), "bf16-mixed", 0),
)


LARGE_VOCABULARY = (
    (replace(SHAPE, vocab_size=16384, tied_embeddings=True), Layout(data_parallel_size=2), "bf16-mixed", 0),
    (replace(SHAPE, vocab_size=16384), Layout(tensor_parallel_size=2, sequence_parallel=True), "bf16-mixed", 0),
    (
        replace(SHAPE, vocab_size=16384),
        Layout(pipeline_parallel_size=2, stages_per_rank=2, schedule="InterleavedZeroBubble"),
        "32-true",
        1,
    ),
)
"""Gradients of the head's weight are larger than those of a micro-batch's logits; a waiting pass holds the latter, too."""


def _compared(layout: Layout, precision: str, rank: int, shape: ModelShape = SHAPE) -> RankComparison:
    batch = BatchSpec(2 * 8 * layout.data_parallel_size, 8)
    scenario = Scenario(shape, layout, batch, numerics=numerics_of(precision))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return compare_ranks(scenario, precision, OptimizerSpec(), [rank])[0]


@pytest.mark.parametrize(("layout", "precision", "rank"), LAYOUTS, ids=lambda value: getattr(value, "name", str(value)))
def test_ledger_and_bill_are_what_is_counted(layout: Layout, precision: str, rank: int) -> None:
    _check(_compared(layout, precision, rank))


@pytest.mark.parametrize(("shape", "layout", "precision", "rank"), LARGE_VOCABULARY, ids=lambda value: getattr(value, "name", ""))
def test_a_large_vocabulary(shape: ModelShape, layout: Layout, precision: str, rank: int) -> None:
    _check(_compared(layout, precision, rank, shape))


def _check(found: RankComparison) -> None:
    for line in found.sent:
        assert line.forecast == pytest.approx(line.counted), line
    for line in found.memory:
        assert line.error == pytest.approx(0, abs=0.05), line


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert main(["plan", "model=llama_tiny", "strategy=dp2_tp2_pp2", "--dry-run", "--ranks", "4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [each["rank"] for each in found["ranks"]] == [4]
    assert main(["plan", "model=llama_tiny", "--dry-run", "--ranks", "7"]) == 2
    assert capsys.readouterr().err.startswith("--ranks is '7': ")
