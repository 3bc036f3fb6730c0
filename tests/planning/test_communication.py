from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_strategy.planning.communication import Messages, Windows, communication_bill
from hybrid_strategy.planning.links import GroupLink, sent_bytes
from hybrid_strategy.planning.placement import Placement
from hybrid_strategy.planning.scenario import Scenario
from hybrid_strategy.planning.stacks import EAGER, ENGINE, FUSED
from hybrid_strategy.spec.batch import BatchSpec
from hybrid_strategy.spec.cluster import ClusterSpec, LinkSpec, cluster_from_mapping
from hybrid_strategy.spec.layout import Layout
from hybrid_strategy.spec.model_shape import ModelShape

GPT = ModelShape(4608, 40, 36, 4 * 4608, 51200, 2048, gated_mlp=False)
NODES = ClusterSpec(num_nodes=8)
A100 = Path(__file__).resolve().parents[2] / "conf" / "cluster" / "a100_80.yaml"
NO_WINDOW = Windows(0, 0, 0, 0)


def bill(layout: Layout, micro_batch: int = 1, pieces: int = 32, stack: object = ENGINE, windows: Windows = NO_WINDOW):
    batch = BatchSpec(layout.data_parallel_size * micro_batch * pieces, num_microbatches=pieces)
    return communication_bill(Scenario(GPT, layout, batch, NODES, stack=stack), windows)


@given(st.integers(2, 4096), st.floats(1e3, 1e11))
@settings(max_examples=50, deadline=None)
def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather(ranks: int, size: float) -> None:
    parts = sent_bytes("reduce_scatter", size, ranks) + sent_bytes("all_gather", size, ranks)
    assert sent_bytes("all_reduce", size, ranks) == pytest.approx(parts)
    assert size <= sent_bytes("all_reduce", size, ranks) < 2 * size


@given(st.sampled_from(["all_reduce", "all_gather", "send"]), st.integers(2, 64), st.floats(1e3, 1e9), st.floats(1e3, 1e9))
@settings(max_examples=50, deadline=None)
def test_more_bytes_take_longer(kind: str, ranks: int, first: float, second: float) -> None:
    link = GroupLink(NODES, ranks)
    small, large = sorted((first, second))
    assert link.seconds(kind, small) <= link.seconds(kind, large)


def test_leaving_the_node_costs() -> None:
    size = 2**30
    inside, outside = GroupLink(NODES, 8), GroupLink(NODES, 16)
    assert (inside.level, outside.level, GroupLink(NODES, 1).level) == ("intra_node", "inter_node", "none")
    assert outside.seconds("all_reduce", size) > 1.2 * inside.seconds("all_reduce", size)
    assert GroupLink(NODES, 8, stride=8).seconds("all_reduce", size) > outside.seconds("all_reduce", size)


A100_ALL_REDUCE = {
    2: {1: 45.1, 4: 60.3, 16: 129.4, 64: 404.0, 1024: 5453.4},
    4: {1: 52.7, 4: 75.8, 16: 177.8, 64: 540.6, 1024: 7275.5},
    8: {1: 92.2, 4: 94.0, 16: 231.0, 64: 579.6, 1024: 8196.4},
}
"""Ranks -> MiB -> microseconds (vTrain f8dda847 trace/a100, in place)."""


@pytest.mark.parametrize("ranks", A100_ALL_REDUCE)
def test_small_groups_and_messages_take_what_was_measured(ranks: int) -> None:
    link = GroupLink(cluster_from_mapping(yaml.safe_load(A100.read_text())), ranks)
    for size, microseconds in A100_ALL_REDUCE[ranks].items():
        assert link.seconds("all_reduce", size * 2**20) == pytest.approx(microseconds * 1e-6, rel=0.2)


def test_a_rack_is_one_node_to_its_links() -> None:
    rack = ClusterSpec(gpus_per_node=4, num_nodes=36, nvlink_domain_size=72)
    assert GroupLink(rack, 64).level == "intra_node"
    assert GroupLink(rack, 144).level == "inter_node"


def test_pairwise_links_are_slow_for_two() -> None:
    mesh = replace(NODES, intra_node=LinkSpec(448e9, 0.75, peer_bytes_per_second=64e9))
    assert GroupLink(mesh, 2).bytes_per_second == 48e9
    assert GroupLink(mesh, 8).bytes_per_second == 336e9


def test_volumes_of_a_10b_model() -> None:
    """L = 40, h = 4608, s = 2048, b = 1, m = 32 on tp 2, pp 8, dp 4: tensor parallelism moves the most, pipelines least."""
    found = bill(Layout(data_parallel_size=4, tensor_parallel_size=2, pipeline_parallel_size=8))
    sent = {axis: sum(line.sent_bytes for line in found.along(axis)) for axis in ("tensor_parallel", "data_parallel")}
    blocks = 4 * 5 * 32 * (2048 * 4608 * 2)
    ends = 32 * (2048 * 4608 * 2)
    assert sent["tensor_parallel"] == pytest.approx(blocks + ends)
    gradients = (5 * 12 * 4608**2 / 2 + 51200 * 4608 / 2) * 2
    assert sent["data_parallel"] == pytest.approx(2 * 3 / 4 * gradients, rel=0.001)
    assert (
        sum(line.sent_bytes for line in found.along("pipeline_parallel")) == 32 * 2048 * 4608 * 2
    )  # the first stage sends one way


def test_sequence_parallelism_moves_the_same() -> None:
    layout = Layout(tensor_parallel_size=8)
    plain, split = bill(layout, stack=FUSED), bill(replace(layout, sequence_parallel=True), stack=FUSED)
    assert split.sent_bytes == pytest.approx(plain.sent_bytes)
    assert {line.collective for line in split.lines} == {"all_gather", "reduce_scatter"}


def test_recomputation_repeats_the_forward_messages() -> None:
    layout = Layout(tensor_parallel_size=8)
    recomputed = replace(layout, activation_checkpoint="full")
    for stack, times in ((FUSED, 2), (ENGINE, 1)):  # torch's checkpoint ends before the block's last message
        plain, again = bill(layout, stack=stack), bill(recomputed, stack=stack)
        assert again.lines[0].calls - plain.lines[0].calls == times * 40 * 32


def test_zero_1_and_2_move_what_ddp_moves_and_zero_3_half_more() -> None:
    sent = {
        kind: bill(Layout(data_parallel_size=8, sharding=kind), pieces=1).sent_bytes
        for kind in ("ddp", "zero1", "zero2", "zero3")
    }
    assert sent["zero1"] == sent["zero2"] == pytest.approx(sent["ddp"])
    assert sent["zero3"] == pytest.approx(1.5 * sent["ddp"])


def test_zero_3_gathers_with_every_micro_batch() -> None:
    layout = Layout(data_parallel_size=8, sharding="zero3")
    assert bill(layout, pieces=4).sent_bytes == pytest.approx(4 * bill(layout, pieces=1).sent_bytes)


def test_replicas_keep_the_gather_in_the_node() -> None:
    layout = Layout(data_parallel_size=64, data_parallel_replicate_size=8, sharding="zero3")
    levels = {line.axis: line.level for line in bill(layout, pieces=1).lines}
    assert levels == {"data_parallel_shard": "intra_node", "data_parallel_replicate": "inter_node"}


@given(st.sampled_from(["zero1", "zero2", "zero3", "ddp"]), st.sampled_from([EAGER, FUSED, ENGINE]), st.floats(0, 100))
@settings(max_examples=40, deadline=None)
def test_a_window_hides_no_more_than_there_is(sharding: str, stack: object, window: float) -> None:
    layout = Layout(data_parallel_size=16, sharding=sharding)
    found = bill(layout, stack=stack, windows=Windows(window, 2 * window, window, 2 * window))
    for line in found.lines:
        assert 0 <= line.exposed_seconds <= line.seconds * (1 + 1e-9)
        assert line.overlapped_seconds >= -1e-12
    assert found.exposed_seconds <= bill(layout, stack=stack).exposed_seconds + 1e-9


def test_placement_fills_nodes_with_the_innermost_axis() -> None:
    layout = Layout(data_parallel_size=2, tensor_parallel_size=4, pipeline_parallel_size=2)
    placed = Placement(layout, ClusterSpec(num_nodes=2))
    assert placed.levels == {
        "pipeline_parallel": "inter_node",
        "data_parallel_replicate": "intra_node",
        "tensor_parallel": "intra_node",
    }
    grid = placed.grid()
    assert [len(row) for row in grid] == [8, 8]
    assert (grid[0][0], grid[1][7]) == ("p0 d0 t0", "p1 d1 t3")
    assert placed.grid(max_nodes=1) == grid[:1]


def test_messages_count_the_micro_batches_of_a_whole_step() -> None:
    layout = Layout(tensor_parallel_size=2)
    scenario = Scenario(GPT, layout, BatchSpec(32, num_microbatches=8, accumulate_grad_batches=4), NODES)
    assert Messages(scenario).calls == 32
