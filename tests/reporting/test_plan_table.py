"""The plan table says what will run, in plain text where there is no terminal."""

from __future__ import annotations

import io

from hybrid_strategy.planning.build_plan import build_plan
from hybrid_strategy.reporting.console import make_console
from hybrid_strategy.reporting.plan_table import print_plan, shorten
from hybrid_strategy.spec.batch import BatchSpec
from hybrid_strategy.spec.layout import Layout
from hybrid_strategy.spec.model_shape import ModelShape
from hybrid_strategy.spec.plan import Plan

SHAPE = ModelShape(64, 8, 4, 128, 512, 32, num_key_value_heads=2)


def _text(plan: Plan, **facts: str) -> str:
    stream = io.StringIO()
    print_plan(plan, facts, make_console(stream))
    return stream.getvalue()


def test_it_holds_layout_batch_schedule_bubble_and_every_rank():
    layout = Layout(tensor_parallel_size=2, pipeline_parallel_size=2, sequence_parallel=True, activation_checkpoint="full")
    text = _text(build_plan(layout, BatchSpec(16, num_microbatches=4), SHAPE), precision="32-true")
    assert "pipeline 2 x data 1 x tensor 2 = 4 processes" in text
    assert "16 samples a step = 1 data-parallel rank x 4 micro-batches of 4" in text
    assert "1F1B, 2 stages, 1 a rank, bubble 20.0%" in text
    assert "ddp, sequence parallel, activation checkpoint full" in text
    assert "32-true" in text
    assert text.count("embed_tokens, layers.0-") == 2
    assert text.count("norm, lm_head") == 2
    assert "\x1b" not in text


def test_interleaved_stages_are_shown_side_by_side():
    layout = Layout(pipeline_parallel_size=2, schedule="Interleaved1F1B", stages_per_rank=2)
    text = _text(build_plan(layout, BatchSpec(8, num_microbatches=4), SHAPE))
    assert "0, 2" in text
    assert " | " in text


def test_one_process_has_no_bubble():
    text = _text(build_plan(Layout(), BatchSpec(8), SHAPE))
    assert "one stage, no bubble" in text
    assert "1 process\n" in text.replace("  ", "").replace(" \n", "\n")


def test_replicas_and_accumulation_are_told():
    layout = Layout(data_parallel_size=4, sharding="zero2", data_parallel_replicate_size=2)
    text = _text(build_plan(layout, BatchSpec(32, accumulate_grad_batches=2), SHAPE))
    assert "zero2, 2 replicas of 2 ranks" in text
    assert "4 data-parallel ranks x 2 accumulated x 1 micro-batch of 4" in text


def test_a_large_world_is_cut():
    text = _text(build_plan(Layout(data_parallel_size=64), BatchSpec(64), SHAPE))
    assert "and 48 more" in text


def test_a_model_of_unknown_shape_has_its_ranks():
    plan = Plan(Layout(pipeline_parallel_size=2), BatchSpec(0, 8), 1 / 9)
    text = _text(plan)
    assert "cut into 8 micro-batches" in text
    assert "parameters" not in text


def test_runs_of_numbers_are_drawn_together():
    assert shorten(("a.0", "a.1", "a.3", "b", "c.4")) == "a.0-1, a.3, b, c.4"
    assert shorten(()) == ""
