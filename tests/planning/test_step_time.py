from __future__ import annotations

from dataclasses import fields, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_strategy.planning.forecast import forecast
from hybrid_strategy.planning.numerics import NUMERICS
from hybrid_strategy.planning.scenario import Scenario
from hybrid_strategy.planning.stacks import COMPILED, EAGER, ENGINE, FUSED
from hybrid_strategy.planning.step_time import StepModel
from hybrid_strategy.spec.batch import BatchSpec
from hybrid_strategy.spec.cluster import ClusterSpec, KernelSpec
from hybrid_strategy.spec.layout import Layout
from hybrid_strategy.spec.model_shape import ModelShape

SHAPE = ModelShape(4096, 32, 32, 14336, 128256, 4096, num_key_value_heads=8)
NODES = ClusterSpec(num_nodes=8)


def scenario(layout: Layout, micro_batch: int = 1, pieces: int = 16, **rest: object) -> Scenario:
    batch = BatchSpec(layout.data_parallel_size * micro_batch * pieces, num_microbatches=pieces)
    return replace(Scenario(SHAPE, layout, batch, NODES), **rest)


layouts = st.builds(
    Layout,
    data_parallel_size=st.sampled_from([1, 2, 8]),
    tensor_parallel_size=st.sampled_from([1, 2, 8]),
    pipeline_parallel_size=st.sampled_from([1, 2, 4]),
    sharding=st.sampled_from(["ddp", "zero1", "zero2", "zero3"]),
    activation_checkpoint=st.sampled_from(["none", "selective", "full"]),
)


@given(layouts, st.sampled_from([ENGINE, EAGER, COMPILED, FUSED, FUSED.classic()]), st.booleans())
@settings(max_examples=50, deadline=None)
def test_parts_are_the_whole_and_none_is_negative(layout: Layout, stack: object, play: bool) -> None:
    step = StepModel(scenario(layout, stack=stack)).step_time(play)
    parts = [getattr(step, each.name) for each in fields(step)]
    assert min(parts) >= -1e-9
    assert sum(parts) == pytest.approx(step.step_seconds)


@given(layouts)
@settings(max_examples=30, deadline=None)
def test_playing_the_table_agrees_with_its_fraction(layout: Layout) -> None:
    model = StepModel(scenario(layout))
    assert model.step_time(True).step_seconds == pytest.approx(model.step_time(False).step_seconds, rel=0.08)


@pytest.mark.parametrize(("name", "chunks"), [("1F1B", 1), ("GPipe", 1), ("Interleaved1F1B", 2)])
def test_equal_stages_idle_as_the_closed_formula_says(name: str, chunks: int) -> None:
    """Without ends, messages and launches the played bubble is (p-1)/(v m+p-1)."""
    shape = replace(SHAPE, vocab_size=1)
    quiet = replace(NODES, kernels=KernelSpec(launch_seconds=0.0, drain_seconds=0.0))
    layout = Layout(pipeline_parallel_size=4, stages_per_rank=chunks, schedule=name)
    found = forecast(scenario(layout, shape=shape, cluster=quiet, stack=replace(ENGINE, loss_bytes=0.0)))
    bubble = found.step.bubble_seconds / (found.step.bubble_seconds + found.step.compute_seconds)
    assert bubble == pytest.approx(3 / (16 * chunks + 3), rel=0.02)


def test_zero_bubble_has_less_of_it() -> None:
    def bubble(name: str, chunks: int) -> float:
        layout = Layout(pipeline_parallel_size=4, stages_per_rank=chunks, schedule=name)
        return forecast(scenario(layout)).step.bubble_seconds

    assert bubble("ZBVZeroBubble", 2) < bubble("Interleaved1F1B", 2) < bubble("1F1B", 1) < bubble("sequential", 1)


def test_recomputation_costs_a_quarter_to_a_third() -> None:
    plain = forecast(scenario(Layout(), micro_batch=4)).step_seconds
    full = forecast(scenario(Layout(activation_checkpoint="full"), micro_batch=4)).step_seconds
    assert 1.2 < full / plain < 1.34


def test_tensor_parallelism_across_nodes_about_doubles_the_step() -> None:
    inside = forecast(scenario(Layout(data_parallel_size=2, tensor_parallel_size=8), micro_batch=4, pieces=4)).step_seconds
    outside = forecast(scenario(Layout(tensor_parallel_size=16), micro_batch=4, pieces=8)).step_seconds
    assert outside > 1.4 * inside


@given(st.sampled_from([1, 2, 4, 8]))
@settings(max_examples=4, deadline=None)
def test_faster_machines_are_faster(nodes: int) -> None:
    layout = Layout(data_parallel_size=8 * nodes, sharding="zero3")
    slow = scenario(layout)
    fast = replace(slow, cluster=replace(NODES, peak_flops=2 * NODES.peak_flops))
    assert forecast(fast).step_seconds < forecast(slow).step_seconds


def test_small_layers_wait_for_the_processor() -> None:
    tiny = replace(
        SHAPE, hidden_size=512, intermediate_size=1024, num_attention_heads=8, num_key_value_heads=8, sequence_length=256
    )
    step = forecast(scenario(Layout(), shape=tiny)).step
    assert step.launch_seconds > step.compute_seconds
    big = forecast(scenario(Layout(), micro_batch=8)).step
    assert big.launch_seconds < 0.01 * big.compute_seconds


def test_utilisation_counts_recomputation_only_in_hfu() -> None:
    found = forecast(scenario(Layout(activation_checkpoint="full"), micro_batch=4))
    assert 0.3 < found.mfu < found.hfu < 0.8
    assert found.hfu / found.mfu == pytest.approx(4 / 3, rel=0.06)
    values = found.to_dict()
    assert values["mfu"] == found.mfu
    assert values["memory"]["total_bytes"] == found.ledger.total_bytes


def test_full_precision_has_its_own_peak() -> None:
    half = forecast(scenario(Layout(), micro_batch=4))
    full = forecast(scenario(Layout(), micro_batch=4, numerics=NUMERICS["fp32"]))
    assert full.step_seconds > 8 * half.step_seconds
    assert 0.3 < full.mfu < 1
    cpu = replace(NODES, peak_fp32_flops=0.0)
    assert forecast(scenario(Layout(), cluster=cpu, numerics=NUMERICS["fp32"])).step_seconds < 2 * half.step_seconds


def test_an_odd_vocabulary_is_slow_unless_it_is_padded() -> None:
    def head(vocabulary: int, **rest: object) -> float:
        return StepModel(scenario(Layout(), shape=replace(SHAPE, vocab_size=vocabulary), **rest)).roofline.head.forward

    assert head(50257) > 1.5 * head(50258)
    assert head(50257, stack=FUSED) == head(50304, stack=FUSED)
    assert head(50257, numerics=NUMERICS["fp32"]) < 1.001 * head(50258, numerics=NUMERICS["fp32"])
    assert head(50257, cluster=replace(NODES, synchronous=True)) < 1.001 * head(50258, cluster=replace(NODES, synchronous=True))


def test_small_micro_batches_pay_for_starting_kernels() -> None:
    """3.6B GPT on 64 GPUs: 3.57 s with one micro-batch of 8, 3.70 s with four of 2 (vTrain): neither bytes nor FLOPs tell."""

    def seconds(micro_batch: int, **kernels: float) -> float:
        cluster = replace(NODES, kernels=replace(NODES.kernels, **kernels))
        return StepModel(scenario(Layout(), micro_batch, 8 // micro_batch, cluster=cluster)).step_time().step_seconds

    assert 1.01 < seconds(1) / seconds(8) < 1.06
    assert seconds(1, drain_seconds=0.0) / seconds(8, drain_seconds=0.0) < 0.995 * seconds(1) / seconds(8)
