from __future__ import annotations

import json
import time
from dataclasses import replace

import pytest

from hybrid_strategy.errors import ConfigError, NoLayoutFitsError
from hybrid_strategy.planning.layouts import check_layout
from hybrid_strategy.planning.reasons import losers, reliefs, strategy_overrides
from hybrid_strategy.planning.report import ReportOptions, bill_rows, plan_report, relief_rows
from hybrid_strategy.planning.search import Question, search
from hybrid_strategy.spec.cluster import ClusterSpec, KernelSpec, LinkSpec
from hybrid_strategy.spec.model_shape import ModelShape

LLAMA_8B = ModelShape(4096, 32, 32, 14336, 128256, 8192, num_key_value_heads=8)
LLAMA_70B = ModelShape(8192, 80, 64, 28672, 128256, 8192, num_key_value_heads=8)
LLAMA_405B = ModelShape(16384, 126, 128, 53248, 128256, 8192, num_key_value_heads=8)
SMALL = ModelShape(512, 8, 8, 2048, 32000, 512)
NODE = ClusterSpec()


def test_a_model_that_fits_is_not_split() -> None:
    winner = search(Question(SMALL, NODE, 256)).winner.scenario.layout
    assert (winner.tensor_parallel_size, winner.pipeline_parallel_size, winner.data_parallel_size) == (1, 1, 8)
    assert winner.activation_checkpoint == "none"


def test_sharding_comes_before_splitting() -> None:
    winner = search(Question(LLAMA_8B, NODE.with_nodes(8), 512)).winner.scenario.layout
    assert (winner.tensor_parallel_size, winner.pipeline_parallel_size) == (1, 1)
    assert winner.sharding in ("zero1", "zero2")


def test_all_that_is_found_fits_and_is_allowed() -> None:
    result = search(Question(LLAMA_70B, NODE.with_nodes(8), 256))
    times = [each.step_seconds for each in result.forecasts[1:6]]
    assert times == sorted(times)
    for each in result.forecasts[:6]:
        assert each.fits
        assert each.scenario.layout.world_size == 64
        check_layout(each.scenario.layout, shape=LLAMA_70B, batch=each.scenario.batch, gpus_per_node=8)
    assert not any(each.ledger.fits for each in result.misfits)


def test_what_is_fixed_stays() -> None:
    fixed = {"tensor_parallel_size": 4, "pipeline_parallel_size": 2, "sharding": "zero1", "micro_batch_size": 2}
    for each in search(Question(LLAMA_8B, NODE, 64, fixed=fixed)).forecasts:
        layout = each.scenario.layout
        assert (layout.tensor_parallel_size, layout.pipeline_parallel_size) == (4, 2)
        assert each.scenario.micro_batch_size == 2


@pytest.mark.parametrize(
    "key", ["schedule", "activation_checkpoint", "sharding", "data_parallel_size", "stages_per_rank", "compile"]
)
def test_every_axis_can_be_fixed(key: str) -> None:
    free = search(Question(SMALL, NODE, 64, fixed={"pipeline_parallel_size": 2})).winner.scenario.layout
    wanted = {
        "schedule": "GPipe",
        "activation_checkpoint": "full",
        "sharding": "zero3",
        "data_parallel_size": 2,
        "stages_per_rank": 4,
        "compile": True,
    }
    fixed = {"pipeline_parallel_size": 2, key: wanted[key]}
    found = search(Question(SMALL, NODE, 64, fixed=fixed)).winner.scenario.layout
    assert getattr(found, key) == wanted[key] != getattr(free, key)


def test_405b_on_16384_gpus_in_a_second() -> None:
    cluster = NODE.with_nodes(2048)
    search(Question(LLAMA_405B, cluster, 2048))
    start = time.process_time()
    result = search(Question(LLAMA_405B, cluster, 2048))
    assert time.process_time() - start < 1
    layout = result.winner.scenario.layout
    assert layout.tensor_parallel_size == 8
    assert layout.pipeline_parallel_size > 1


def test_losers_have_their_reasons() -> None:
    result = search(Question(LLAMA_70B, NODE.with_nodes(16), 1024))
    reasons = {each.change: each.reason for each in losers(result)}
    assert reasons["ddp"].startswith("does not fit: ")
    assert reasons["ddp"].endswith("GiB of states")
    assert reasons["tp=16"].startswith("leaves the node; +")
    assert any("recomputation +" in reason for reason in reasons.values())


def test_nothing_fits() -> None:
    question = Question(LLAMA_405B, NODE, 16)
    with pytest.raises(NoLayoutFitsError, match="no layout fits its memory"):
        _ = search(question).winner
    found = reliefs(question)
    assert found
    assert all(each.forecast.fits for each in found)
    assert found[0].overrides[0].startswith("cluster.num_nodes=")
    assert relief_rows(question)[0]["overrides"] == found[0].overrides[0]


def test_what_was_fixed_is_freed_first() -> None:
    question = Question(
        LLAMA_8B, NODE.with_nodes(8), 512, fixed={"sharding": "ddp", "tensor_parallel_size": 1, "pipeline_parallel_size": 1}
    )
    assert not search(question).forecasts
    assert "strategy.tensor_parallel_size=1" in reliefs(question)[0].overrides


def test_overrides_say_the_whole_layout() -> None:
    found = search(Question(LLAMA_70B, NODE.with_nodes(8), 256, fixed={"pipeline_parallel_size": 4})).winner
    words = dict(each.split("=") for each in strategy_overrides(found))
    layout = found.scenario.layout
    assert words["strategy.schedule"] == layout.schedule
    assert words["strategy.pipeline_parallel_size"] == "4"
    assert words.get("strategy.sequence_parallel", "false") == str(layout.sequence_parallel).lower()


def test_the_report_is_plain_data() -> None:
    report = plan_report(search(Question(LLAMA_70B, NODE.with_nodes(16), 1024)), ReportOptions(count=5))
    assert len(report.layouts) <= 5
    assert report.layouts[0]["#"] == "1"
    assert len({tuple(row) for row in report.layouts}) == 1
    assert json.loads(json.dumps(report.values))["winner"]["fits"]
    assert report.job == {"nodes": 16, "ntasks_per_node": 8}
    assert report.memory[-1]["line"] == "total"
    assert report.bill[-1]["axis"] == "total"
    assert report.ladder[-1]["step"] == "the whole model"
    assert report.ladder[0]["command"].startswith("hybrid train model.num_layers=")
    assert len(report.placement) == 4
    assert "70.55B" in report.title


def test_one_process_has_no_bill() -> None:
    one = replace(NODE, gpus_per_node=1)
    assert bill_rows(search(Question(SMALL, one, 8)).winner.bill) == []


def test_long_sequences_may_be_shared_where_rows_are_few() -> None:
    """16 rows on 32 GPUs: a row must be shared, and of what shares it only context parallelism leaves the layers whole."""
    question = Question(replace(LLAMA_8B, sequence_length=131072), NODE.with_nodes(4), 16)
    found = {each.scenario.layout.context_parallel_size for each in search(question).forecasts}
    assert max(found) > 1
    short = search(Question(LLAMA_8B, NODE.with_nodes(8), 512))
    assert {each.scenario.layout.context_parallel_size for each in short.forecasts} == {1}


def test_context_parallel_ranks_share_the_states() -> None:
    fixed = {"context_parallel_size": 8, "sharding": "zero3"}
    layout = search(Question(LLAMA_8B, NODE, 8, fixed=fixed)).winner.scenario.layout
    assert (layout.shard_size, layout.state_shards) == (1, 8)
    assert "strategy.context_parallel_size=8" in strategy_overrides(search(Question(LLAMA_8B, NODE, 8, fixed=fixed)).winner)


def test_a_number_of_micro_batches_stays_and_is_said_as_it_was() -> None:
    question = Question(SMALL, NODE, 32, fixed={"num_microbatches": 3})
    result = search(question)
    assert {each.scenario.batch.num_microbatches for each in result.forecasts} == {3}
    words = plan_report(result).overrides
    assert "strategy.num_microbatches=3" in words
    assert not any("micro_batch_size" in word for word in words)


@pytest.mark.parametrize(
    "fixed",
    [
        {"data_parallel_replicate_size": 2, "sharding": "zero3"},
        {"schedule": "dualpipev"},
        {"schedule": "dualpipev", "pipeline_parallel_size": 8},
        {"stages_per_rank": 2},
    ],
)
def test_what_is_fixed_leaves_out_what_it_excludes(fixed: dict[str, object]) -> None:
    result = search(Question(SMALL, NODE, 32, fixed=fixed))
    assert bool(result.forecasts) is (fixed != {"schedule": "dualpipev", "pipeline_parallel_size": 8})  # 16 stages of 8 layers
    for each in result.forecasts:
        check_layout(each.scenario.layout, shape=SMALL, batch=each.scenario.batch)


@pytest.mark.parametrize(("gpus", "domain", "sizes"), [(6, 0, {1, 2}), (4, 8, {1, 2, 4, 8})])
def test_tensor_parallel_groups_stay_where_links_are_fast(gpus: int, domain: int, sizes: set[int]) -> None:
    cluster = replace(NODE, num_nodes=2, gpus_per_node=gpus, nvlink_domain_size=domain)
    found = {each.scenario.layout.tensor_parallel_size for each in search(Question(LLAMA_8B, cluster, 96)).forecasts}
    assert found == sizes


def test_freed_settings_are_set_back() -> None:
    fixed = {"data_parallel_size": 1, "pipeline_parallel_size": 8, "stages_per_rank": 4, "num_microbatches": 2, "sharding": "ddp"}
    found = reliefs(Question(LLAMA_8B, NODE, 512, fixed={**fixed, "accumulate_grad_batches": 2}))[0]
    words = dict(each.split("=") for each in found.overrides)
    assert words["strategy.data_parallel_size"] == "auto"
    assert words["strategy.num_microbatches"] == "null"
    assert words["strategy.stages_per_rank"] != "4"
    assert found.forecast.scenario.batch.accumulate_grad_batches == 2


@pytest.mark.parametrize(
    "wrong",
    [
        {"kernels": KernelSpec(matmul_efficiency=0.0)},
        {"intra_node": LinkSpec(0.0)},
        {"num_nodes": 2, "inter_node": LinkSpec(25e9, efficiency=0.0)},
        {"allocator_fraction": -0.1},
        {"peak_flops": float("inf")},
    ],
)
def test_machines_that_would_never_finish_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"^cluster\.[a-z_.]+ is .*: it m"):
        replace(NODE, **wrong)
    assert replace(NODE, gpus_per_node=1, intra_node=LinkSpec(0.0)).num_gpus == 1  # no link, none needed
