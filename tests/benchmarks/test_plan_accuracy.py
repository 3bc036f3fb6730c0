from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROWS = ROOT / "tests" / "data" / "published" / "layouts.csv"


def load(name: str) -> ModuleType:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))


plan_rows = load("plan_rows")
plan_accuracy = load("plan_accuracy")


@pytest.fixture(scope="module")
def result() -> dict:
    return plan_accuracy.score(plan_rows.read_rows(ROWS))


def test_analytic_rows_are_exact(result: dict) -> None:
    assert set(result["exact"]) == {"korthikanti22-mem", "zero-paper", "all"}
    assert max(abs(each[key]) for each in result["exact"].values() for key in ("p90", "lowest")) < 0.5


def test_published_flops_are_counted_again(result: dict) -> None:
    sources = [each for source, each in result["flops"].items() if source not in ("fms-fsdp", "all")]  # states rounded MFUs
    assert all(each["median"] < 1 for each in sources)


def test_step_times(result: dict) -> None:
    times = result["step_time"]
    assert all(each["median"] <= 10 for each in times.values())
    assert times["all"]["median"] <= 8
    assert times["all"]["p90"] <= 25


def test_memory(result: dict) -> None:
    memory = result["memory"]
    assert memory["all"]["median"] <= 10
    assert memory["all"]["lowest"] >= -15


def test_ranking(result: dict) -> None:
    assert {source for source, each in result["ranking"].items() if each["tau"] >= 0.8} == set(result["ranking"])


def test_the_layout_chosen_is_scored_and_has_a_goal() -> None:
    rows = [row for row in plan_rows.read_rows(ROWS) if row.source == "zero-bubble"]
    exact = plan_accuracy.ranking(rows, lambda row: row.measured_seconds)["zero-bubble"]
    assert (exact["tau"], exact["within_5_percent"], exact["worst_loss"]) == (1, exact["groups"], 0)
    wrong = plan_accuracy.ranking(rows, lambda row: -row.measured_seconds)["zero-bubble"]
    assert wrong["within_5_percent"] < wrong["groups"]
    name = "ranking zero-bubble: layout chosen within 5% of the best measured one in every group"
    empty = {"exact": {}, "step_time": {}, "memory": {}, "out_of_memory": {"n": 0}}
    for each in (exact, wrong):
        assert dict(plan_accuracy.goals({**empty, "ranking": {"zero-bubble": each}}))[name] is (each is exact)
    errors = [plan_accuracy.attainable(rows, error, draws=3)["zero-bubble"]["tau"] for error in (0.0, 0.05, 0.5)]
    assert errors[0] == 1 > errors[1] > errors[2]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "scores.json"
    assert plan_accuracy.main(["--rows", str(ROWS), "--json", str(target)]) == 0
    printed = capsys.readouterr().out
    assert "step time: median <= 8 % over all" in printed
    written = json.loads(target.read_text())
    assert written["step_time"]["all"]["n"] > 100
    for text, met in written["goals"].items():
        assert f"  {'met   ' if met else 'MISSED'} {text}\n" in printed
    for source, each in written["ranking"].items():
        assert f"{each['within_5_percent']} of {each['groups']}" in next(
            line for line in printed.partition("\nranking\n")[2].splitlines() if line.startswith(source)
        )


def test_what_is_blank_is_filled_or_left_out() -> None:
    rows = plan_rows.read_rows(ROWS)
    left_out = [row for row in rows if row.missing]
    assert left_out
    assert all(plan_accuracy.time_error(row) is None for row in left_out)
    stages = [row for row in rows if row.source == "zero-bubble"]
    assert {row.scenario.shape.num_layers for row in stages} == {46}


@pytest.mark.parametrize(
    "column", ["layers", "heads", "vocab", "gpu", "gpus_per_node", "dp", "tp", "pp", "global_batch", "micro_batch"]
)
def test_any_column_may_be_blank(column: str) -> None:
    for row in plan_rows.read_rows(ROWS)[::9]:
        read = plan_rows.read_row({**row.values, column: ""})
        assert read.scenario is None or read.forecast_seconds > 0


def test_networks_are_read_from_the_notes() -> None:
    row = next(row for row in plan_rows.read_rows(ROWS) if row.source == "fms-fsdp")
    assert row.scenario.cluster.inter_node.bytes_per_second == 400e9 / 8 / 8
    slow = plan_rows.read_row({**row.values, "notes": "[measured] 4x100 Gb/s OPA per 8 GPUs"})
    assert slow.scenario.cluster.inter_node.bytes_per_second == 400e9 / 8 / 8


def test_ties_are_not_ranked() -> None:
    assert plan_accuracy.kendall_tau([1, 1.01, 2], [2, 1, 3], apart=0.05) == 1
    assert plan_accuracy.kendall_tau([1, 2, 3], [3, 2, 1]) == -1


@pytest.mark.parametrize("path", sorted((ROOT / "conf" / "cluster").glob("*.yaml")), ids=lambda path: path.stem)
def test_clusters_are_read(path: Path) -> None:
    if path.stem == "local":
        return
    cluster = plan_rows.cluster_named(path.stem)
    assert cluster.name == path.stem
    assert cluster.source
    assert 1e9 < cluster.inter_node.bytes_per_second < cluster.intra_node.bytes_per_second
    assert 0.3 < cluster.kernels.matmul_efficiency < 1
