"""Layouts of a sweep: all valid ones, each once, counted by brute force; the others with the reason the engine would give."""

from __future__ import annotations

import itertools

import pytest

from hybrid_strategy.errors import ConfigError, LayoutError
from hybrid_strategy.planning.batches import resolve_batch
from hybrid_strategy.planning.layouts import check_layout, resolve_layout
from hybrid_strategy.planning.numerics import NUMERICS
from hybrid_strategy.spec.cluster import ClusterSpec
from hybrid_strategy.spec.layout import SHARDINGS
from hybrid_strategy.spec.model_shape import ModelShape
from hybrid_strategy.sweeping.axes import AXES, Axes
from hybrid_strategy.sweeping.layouts import Candidate, Skipped, Space, check_values, layouts
from hybrid_strategy.sweeping.pruning import Judge, by_kind, prune, take_best

SMALL = ModelShape(64, 6, 4, 128, 512, 32, num_key_value_heads=2)
LARGE = ModelShape(16384, 128, 128, 53248, 128256, 8192, num_key_value_heads=8)


def _split(space: Space) -> tuple[list[Candidate], list[Skipped]]:
    found = list(layouts(space))
    return [each for each in found if isinstance(each, Candidate)], [each for each in found if isinstance(each, Skipped)]


def _valid(tensor: int, pipeline: int, count: int, world: int, shape: ModelShape, rows: int) -> bool:
    try:
        layout = resolve_layout(world_size=world, tensor_parallel_size=tensor, pipeline_parallel_size=pipeline)
        check_layout(layout, shape=shape, batch=resolve_batch(layout, global_batch_size=rows, num_microbatches=count))
    except LayoutError:
        return False
    return True


def test_a_grid_of_sizes_has_the_points_that_brute_force_finds():
    given = {"tensor_parallel_size": (1, 2, 4), "pipeline_parallel_size": (1, 2, 4), "num_microbatches": (1, 4)}
    candidates, skipped = _split(Space(4, Axes(given, free=()), shape=SMALL, global_batch_size=8))
    expected = {each for each in itertools.product(*given.values()) if _valid(*each, 4, SMALL, 8)}
    found = {
        (each.values["tensor_parallel_size"], each.values["pipeline_parallel_size"], each.values["num_microbatches"])
        for each in candidates
    }
    assert found == expected
    assert len(candidates) == len(expected)
    assert all(each.kind == "refused" and each.reason.endswith(".") for each in skipped)


def test_one_data_parallel_rank_has_nothing_to_shard_and_is_run_once():
    given = {"sharding": ("zero2", "ddp", "zero1"), "num_microbatches": (4, 8)}
    candidates, skipped = _split(Space(2, Axes(given), shape=SMALL, global_batch_size=8))
    runs = [(each.layout.name, each.values["sharding"], each.batch.num_microbatches) for each in candidates]
    for name in ("pp2", "tp2"):
        assert [each[1:] for each in runs if each[0].startswith(name)] == [("zero2", 4), ("zero2", 8)]
    assert len([each for each in runs if each[0].startswith("dp2")]) == 3
    reason = "sharding is 'ddp': one data-parallel rank has nothing to shard. It would be the run with zero2 once more."
    assert [each.reason for each in skipped if each.name == "pp2_ddp"] == [reason]
    assert sorted(each.name for each in skipped if "nothing to shard" in each.reason) == [
        "pp2_ddp",
        "pp2_zero1",
        "tp2_ddp",
        "tp2_zero1",
    ]


@pytest.mark.parametrize("world", [1, 2, 6, 8, 12])
def test_free_sizes_multiply_to_the_world_and_pass_the_engine(world: int):
    candidates, _ = _split(Space(world, Axes(), shape=SMALL, global_batch_size=24))
    assert candidates
    seen = set()
    for each in candidates:
        assert each.layout.world_size == world
        check_layout(each.layout, shape=SMALL, batch=each.batch)
        assert each.layout not in seen, "the same layout twice"
        seen.add(each.layout)


def test_nothing_is_swept_that_would_do_nothing():
    candidates, _ = _split(Space(8, Axes(free=AXES), shape=SMALL, global_batch_size=32))
    for each in candidates:
        layout = each.layout
        assert layout.data_parallel_size > 1 or layout.sharding == "ddp"
        assert layout.tensor_parallel_size > 1 or not layout.sequence_parallel
        assert layout.pipeline_parallel_size > 1 or layout.stages_per_rank == 1
    shardings = {each.layout.sharding for each in candidates}
    assert shardings == set(SHARDINGS)


def test_schedules_are_tried_where_there_is_a_pipeline_and_nowhere_else():
    space = Space(2, Axes({"schedule": ("GPipe", "1F1B")}), global_batch_size=8)
    sizes = [each.layout.pipeline_parallel_size for each in layouts(space) if isinstance(each, Candidate)]
    assert (sizes.count(1), sizes.count(2)) == (5, 2)


def test_a_size_that_does_not_fit_is_refused_with_the_valid_ones():
    _, skipped = _split(Space(8, Axes({"tensor_parallel_size": (3,)}), shape=SMALL))
    (only,) = skipped
    assert only.kind == "refused"
    assert "3 (tensor) = 3 does not divide 8" in only.reason
    assert "Set 1, 2, 4 or 8" in only.reason


def test_a_data_parallel_size_that_is_part_of_no_layout_is_told():
    found, (skipped,) = _split(Space(2, Axes({"data_parallel_size": (1, 4)}, ("tensor_parallel_size", "pipeline_parallel_size"))))
    assert "data_parallel_size is 4" in skipped.reason
    assert {each.layout.name for each in found} == {"pp2", "tp2"}


def test_tensor_parallel_groups_stay_inside_a_node():
    candidates, skipped = _split(Space(16, Axes({"tensor_parallel_size": (4,)}), gpus_per_node=2, shape=SMALL))
    assert not candidates
    assert any("node" in each.reason or "num_key_value_heads" in each.reason for each in skipped)


@pytest.mark.parametrize(("axis", "value"), [("sharding", "zero9"), ("activation_checkpoint", "ful"), ("schedule", "1F1C")])
def test_a_word_that_names_nothing_is_no_layout_that_does_not_fit(axis: str, value: str):
    with pytest.raises(ConfigError, match="Did you mean"):
        check_values(axis, (value,))


def test_an_axis_that_is_none_is_refused():
    with pytest.raises(ConfigError, match="Did you mean 'sharding'"):
        Axes(free=("shardin",))


def test_what_cannot_fit_or_win_is_set_aside_with_numbers():
    cluster = ClusterSpec(num_nodes=8)
    candidates = layouts(
        Space(
            64, Axes(free=("tensor_parallel_size", "pipeline_parallel_size", "sharding", "activation_checkpoint")), 8, LARGE, 64
        )
    )
    kept, skipped = prune(candidates, Judge(LARGE, cluster, NUMERICS["mixed"]))
    kinds = by_kind(skipped)
    assert kinds["memory"] > 0
    assert not kept or kept[0].step_seconds == min(each.step_seconds for each in kept)
    reasons = [each.reason for each in skipped if each.kind == "memory"]
    assert all("GiB" in reason for reason in reasons)


def test_the_fastest_forecast_is_kept_and_the_slow_name_it():
    shape = ModelShape(4096, 32, 32, 14336, 128256, 8192, num_key_value_heads=8)
    free = ("tensor_parallel_size", "pipeline_parallel_size", "sharding", "activation_checkpoint")
    judge = Judge(shape, ClusterSpec(num_nodes=2), NUMERICS["mixed"], slack=1.2)
    kept, skipped = prune(layouts(Space(16, Axes(free=free), 8, shape, 64)), judge)
    assert kept
    best = kept[0].step_seconds
    assert best is not None
    assert all(each.step_seconds is not None and each.step_seconds <= 1.2 * best for each in kept)
    everything, _ = judge.all_of(layouts(Space(16, Axes(free=free), 8, shape, 64)))
    fitting = [each for each in everything if each.memory_bytes <= judge.cluster.memory_bytes]
    assert best == min(each.step_seconds for each in fitting if each.step_seconds is not None)
    assert any("x the best" in each.reason for each in skipped)
    best_two, rest = take_best(kept, 2)
    assert len(best_two) == 2
    assert [each.kind for each in rest] == ["rank"] * (len(kept) - 2)


def test_16384_ranks_with_every_axis_free():
    """Each is judged (`benchmarks/search_speed.py` has the seconds)."""
    found = list(layouts(Space(16384, Axes(free=AXES), 8, LARGE, 16384)))
    kept, skipped = prune(found, Judge(LARGE, ClusterSpec(num_nodes=2048), NUMERICS["mixed"]))
    assert len(found) == len(kept) + len(skipped) > 10_000
    assert kept
