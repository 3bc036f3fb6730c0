"""What the user has fixed, what the planner decides, and what is known of this machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybrid_strategy.config.compose import Source, run_config
from hybrid_strategy.config.machine import (
    PROCESSOR,
    Machine,
    cluster_of,
    machine_file,
    read_machine,
    shared,
    this_machine,
    write_machine,
)
from hybrid_strategy.config.plan import plan_of
from hybrid_strategy.config.question import fixed_of
from hybrid_strategy.config.world import World
from hybrid_strategy.errors import ConfigError, NoLayoutFitsError
from hybrid_strategy.spec.cluster import ClusterSpec

BIG = ("model=llama3_8b", "cluster=h100_sxm", "precision=bf16_mixed", "data.global_batch_size=64")


def _fixed(*overrides: str) -> dict[str, object]:
    return fixed_of(run_config(Source(overrides)), overrides)


def test_what_differs_or_is_named_is_fixed() -> None:
    assert _fixed() == {}
    assert _fixed("strategy=tp2_pp2") == {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    assert _fixed("strategy.tensor_parallel_size=1", "strategy.sharding=ddp") == {"tensor_parallel_size": 1, "sharding": "ddp"}
    assert _fixed("strategy=auto") == {}
    assert _fixed("strategy=auto", "strategy.compile=true") == {"compile": True}
    assert _fixed("strategy=auto", "strategy.schedule=GPipe") == {"schedule": "GPipe"}
    assert _fixed("strategy.pipeline_parallel_size=2", "strategy.stage_cuts=[4]")["stage_layers"] == (3, 5)


def test_auto_takes_the_planners_choice() -> None:
    planned = plan_of(run_config(Source((*BIG, "strategy=auto"))))
    assert planned.plan.layout.world_size == 8
    assert planned.strategy.sharding == planned.plan.layout.sharding != "ddp"
    assert planned.strategy.micro_batch_size == planned.plan.batch.micro_batch_size(planned.plan.layout.data_parallel_size)
    assert "the planner's choice among" in planned.plan.reasons[-1]
    fixed = plan_of(run_config(Source((*BIG, "strategy=auto", "strategy.tensor_parallel_size=4")))).plan.layout
    assert fixed.tensor_parallel_size == 4
    assert plan_of(run_config(Source((*BIG, "strategy=auto", "strategy.compile=true")))).plan.layout.compile
    free = ("strategy.sharding=auto", "strategy.activation_checkpoint=auto")
    one = plan_of(run_config(Source((*BIG, *free)))).plan.layout
    assert (one.tensor_parallel_size, one.pipeline_parallel_size) == (1, 1)


def test_auto_without_knowledge_is_data_parallel_and_says_so() -> None:
    overrides = ("model._target_=my.Module", "data._target_=my.Data", "strategy=auto", "cluster=h100_sxm")
    planned = plan_of(run_config(Source(overrides)))
    assert planned.plan.layout.name == "dp8"
    assert "since the sizes of the model my.Module are not known" in planned.plan.reasons[-1]


def test_auto_refuses_what_does_not_fit() -> None:
    with pytest.raises(NoLayoutFitsError, match="no layout fits its memory"):
        plan_of(run_config(Source(("model=llama3_405b", "cluster=h100_sxm", "strategy=auto"))))
    with pytest.raises(ConfigError, match=r"strategy\.sequence_parallel is 'maybe'"):
        plan_of(run_config(Source(("strategy.sequence_parallel=maybe",))))


def test_processes_share_a_processor() -> None:
    machine = Machine(PROCESSOR, cores=4, alone={"peak_flops": 3.0})
    one, two, eight = (shared(machine, count) for count in (1, 2, 8))
    assert one.peak_flops == 3 * PROCESSOR.peak_flops
    assert two.peak_flops == 2 * PROCESSOR.peak_flops
    assert eight.peak_flops == PROCESSOR.peak_flops / 2
    assert eight.kernels.launch_seconds == 2 * PROCESSOR.kernels.launch_seconds
    assert two.memory_bytes == 4 * eight.memory_bytes
    assert shared(Machine(ClusterSpec()), 8) == ClusterSpec()


def test_what_was_measured_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYBRID_STRATEGY_CACHE", str(tmp_path))
    assert this_machine(None, World(1, 1, "cpu")).source.startswith("a guess")
    measured = Machine(ClusterSpec(name="local", source="measured", measured=True, peak_flops=1e12), 2.0, {"peak_flops": 2.0})
    path = machine_file(None, "cpu")
    write_machine(path, measured)
    assert read_machine(path) == measured
    config = run_config(Source(("cluster.reserve_bytes=7",)))
    found = cluster_of(config, World(1, 2, "cpu"))
    assert (found.peak_flops, found.measured, found.reserve_bytes, found.gpus_per_node) == (1e12, True, 7, 2)
