from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hybrid_strategy.planning.activations import block_activations
from hybrid_strategy.planning.build_plan import build_plan
from hybrid_strategy.planning.memory import likely_peak_ledger, memory_ledger, memory_ledgers, peak_ledger
from hybrid_strategy.planning.numerics import NUMERICS, numerics_of
from hybrid_strategy.planning.scenario import Scenario, planned_scenario
from hybrid_strategy.planning.stacks import COMPILED, EAGER, ENGINE, FUSED
from hybrid_strategy.spec.batch import BatchSpec
from hybrid_strategy.spec.cluster import ClusterSpec
from hybrid_strategy.spec.layout import Layout
from hybrid_strategy.spec.ledger import LEDGER_CATEGORIES
from hybrid_strategy.spec.model_shape import ModelShape

SHAPE = ModelShape(1024, 16, 16, 4096, 32000, 2048, num_key_value_heads=8)
# arXiv:2205.05198 figure 1: hidden, heads, layers, pp, v, micro-batch, GiB of activations without and with both techniques
KORTHIKANTI = (
    (6144, 64, 48, 1, 1, 4, 59.25, 9.5625),
    (12288, 96, 96, 8, 3, 1, 66.84375, 12.3515625),
    (20480, 128, 105, 35, 3, 1, 114.0234375, 23.076171875),
    (25600, 160, 128, 64, 1, 1, 131.25, 26.5625),
)

layouts = st.builds(
    Layout,
    data_parallel_size=st.sampled_from([1, 2, 4, 8]),
    tensor_parallel_size=st.sampled_from([1, 2, 4, 8]),
    pipeline_parallel_size=st.sampled_from([1, 2, 4]),
    sharding=st.sampled_from(["ddp", "zero1", "zero2", "zero3"]),
    activation_checkpoint=st.sampled_from(["none", "selective", "full"]),
)
stacks = st.sampled_from([ENGINE, EAGER, COMPILED, FUSED, FUSED.classic()])


def scenario(layout: Layout, micro_batch: int = 2, pieces: int = 8, **rest: object) -> Scenario:
    batch = BatchSpec(layout.data_parallel_size * micro_batch * pieces, num_microbatches=pieces)
    return replace(Scenario(SHAPE, layout, batch), **rest)


@pytest.mark.parametrize("row", KORTHIKANTI)
def test_activations_of_the_paper(row: tuple[float, ...]) -> None:
    hidden, heads, layers, pipeline, chunks, micro, without, with_both = row
    shape = ModelShape(int(hidden), int(layers), int(heads), int(4 * hidden), 51200, 2048, gated_mlp=False, bias=True)
    schedule = "Interleaved1F1B" if chunks > 1 else "1F1B"
    layout = Layout(tensor_parallel_size=8, pipeline_parallel_size=int(pipeline), stages_per_rank=int(chunks), schedule=schedule)
    batch = BatchSpec(int(4 * pipeline * micro), num_microbatches=int(4 * pipeline))
    for change, stated in (({}, without), ({"sequence_parallel": True, "activation_checkpoint": "selective"}, with_both)):
        tried = Scenario(shape, replace(layout, **change), batch, stack=FUSED.classic())
        kept = next(line for line in memory_ledger(tried, 0).lines if line.name == "kept, blocks")
        assert kept.bytes / 2**30 == pytest.approx(stated, rel=1e-6)


@given(layouts, stacks, st.sampled_from(list(NUMERICS.values())))
@settings(max_examples=60, deadline=None)
def test_parts_sum_to_the_whole(layout: Layout, stack: object, numerics: object) -> None:
    for ledger in memory_ledgers(scenario(layout, stack=stack, numerics=numerics)):
        assert sum(ledger.by_category.values()) == pytest.approx(ledger.total_bytes)
        assert set(ledger.by_category) <= set(LEDGER_CATEGORIES)
        assert all(line.bytes >= 0 and line.source for line in ledger.lines)
        assert ledger.to_dict()["total_bytes"] == ledger.total_bytes


@given(layouts, stacks)
@settings(max_examples=60, deadline=None)
def test_splitting_more_never_needs_more(layout: Layout, stack: object) -> None:
    """More tensor parallelism, more shards, a heavier sharding or checkpoint: not more memory per rank."""
    assume(layout.tensor_parallel_size < 8)

    def total(tried: Layout) -> float:
        return peak_ledger(scenario(tried, stack=replace(stack, split_logits_bytes=0.0))).total_bytes

    here = total(layout)
    assert total(replace(layout, tensor_parallel_size=2 * layout.tensor_parallel_size)) <= here
    if layout.tensor_parallel_size > 1 and not stack.copies_gathered:
        assert total(replace(layout, sequence_parallel=True)) <= here
    order = ["ddp", "zero1", "zero2"]
    if layout.sharding in order:
        sizes = [total(replace(layout, sharding=sharding)) for sharding in order]
        assert sizes == sorted(sizes, reverse=True)


@given(layouts, stacks)
@settings(max_examples=60, deadline=None)
def test_recomputing_more_never_keeps_more(layout: Layout, stack: object) -> None:
    kept = [
        block_activations(scenario(replace(layout, activation_checkpoint=kind), stack=stack)).kept
        for kind in ("none", "selective", "full")
    ]
    assert kept == sorted(kept, reverse=True)


@given(st.integers(1, 8), st.integers(1, 8))
@settings(max_examples=30, deadline=None)
def test_larger_micro_batches_keep_more(first: int, second: int) -> None:
    small, large = sorted((first, second))
    sizes = [
        peak_ledger(scenario(Layout(pipeline_parallel_size=2), micro)).of("activations", "logits") for micro in (small, large)
    ]
    assert sizes == sorted(sizes)


@pytest.mark.parametrize(("name", "chunks"), [("1F1B", 1), ("GPipe", 1), ("Interleaved1F1B", 2), ("ZBVZeroBubble", 2)])
def test_the_likely_peak_is_the_peak(name: str, chunks: int) -> None:
    for stage_batch in (1, 4, 16):
        layout = Layout(pipeline_parallel_size=4, stages_per_rank=chunks, schedule=name)
        tried = scenario(layout, micro_batch=stage_batch, pieces=16)
        assert likely_peak_ledger(tried).total_bytes == pytest.approx(peak_ledger(tried).total_bytes, rel=0.01)


def test_gpipe_holds_all_micro_batches_and_1f1b_those_of_its_ranks() -> None:
    def kept(name: str) -> float:
        return memory_ledger(scenario(Layout(pipeline_parallel_size=4, schedule=name), pieces=16), 0).of("activations")

    assert kept("GPipe") / kept("1F1B") == pytest.approx(4, rel=0.1)


def test_shared_parameters_add_up() -> None:
    """All ranks of a split model together hold the model (norms once a tensor-parallel rank)."""
    layout = Layout(tensor_parallel_size=2, pipeline_parallel_size=4)
    tried = scenario(layout)
    total = sum(tried.rank_parameters(rank) for rank in range(4)) * 2
    norms = (2 * SHAPE.num_layers + 1) * SHAPE.hidden_size
    assert total == pytest.approx(SHAPE.num_parameters + norms)


def test_stages_are_those_of_the_plan() -> None:
    layout = Layout(pipeline_parallel_size=4, data_parallel_size=2)
    plan = build_plan(layout, BatchSpec(16, num_microbatches=8), SHAPE)
    tried = planned_scenario(plan, SHAPE, ClusterSpec(), NUMERICS["mixed"])
    assert tried.layers_of_stage == scenario(layout).layers_of_stage
    assert [tried.rank_parameters(rank) for rank in range(4)] == [plan.rank_parameters[2 * rank] for rank in range(4)]


def test_numerics_of_lightning() -> None:
    assert numerics_of("bf16-mixed").cast_bytes == 2
    assert numerics_of("32-true", "sgd", momentum=0.9).moment_bytes == 4
    with pytest.raises(Exception, match="precision is 'bf-16': it is not known"):
        numerics_of("bf-16")
