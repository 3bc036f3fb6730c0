"""`hybrid calibrate`: from runs that were measured to a machine under whose numbers their forecasts are right."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hybrid_strategy.cli.main import main
from hybrid_strategy.config.compose import Source, run_config
from hybrid_strategy.config.forecasting import scenario_of
from hybrid_strategy.config.machine import PROCESSOR, Machine, machine_file, read_machine, write_machine
from hybrid_strategy.config.plan import plan_of
from hybrid_strategy.config.storage import RESULT_FILE, write_config
from hybrid_strategy.files import write_json
from hybrid_strategy.planning.calibrate import with_coefficients
from hybrid_strategy.planning.forecast import forecast

LAYOUTS = ("single", "dp2", "tp2", "pp2")
TRUE = {"kernels.matmul_efficiency": 0.35, "kernels.launch_seconds": 3e-5}


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Folders of runs on a machine that is slower than it is believed to be."""
    monkeypatch.setenv("HYBRID_STRATEGY_CACHE", str(tmp_path / "cache"))
    folders = []
    for layout in LAYOUTS:
        write_machine(machine_file(None, "cpu"), Machine(with_coefficients(PROCESSOR, TRUE), 2.0))
        config = run_config(Source(("experiment=quickstart", f"strategy={layout}", "trainer=cpu")))
        scenario = scenario_of(config, plan_of(config))
        assert scenario is not None
        expected = forecast(scenario)
        folder = tmp_path / layout
        folder.mkdir()
        write_config(config, folder)
        memory = expected.ledger.total_bytes + 1e8
        write_json(folder / RESULT_FILE, {"measured": {"step_seconds": expected.step_seconds, "peak_memory_bytes": memory}})
        folders.append(folder)
    write_machine(machine_file(None, "cpu"), Machine(PROCESSOR, 2.0))
    return folders


def test_forecasts_come_near_what_was_measured(runs: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", *map(str, runs), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["file"] == str(machine_file(None, "cpu"))
    for row in found["runs"]:
        before, after = (abs(row[name] / row["step_seconds"] - 1) for name in ("forecast_before", "forecast"))
        assert after < 0.05 < before
        assert row["forecast_memory_bytes"] == pytest.approx(row["peak_memory_bytes"], rel=1e-6)
    kept = read_machine(machine_file(None, "cpu")).cluster
    assert kept.measured
    assert kept.reserve_bytes == pytest.approx(PROCESSOR.reserve_bytes + 1e8)
    assert kept.kernels.matmul_efficiency < PROCESSOR.kernels.matmul_efficiency


def test_it_writes_a_cluster_file(runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "conf" / "cluster" / "mine.yaml"
    assert main(["calibrate", str(runs[0]), "--output", str(file)]) == 0
    assert "kernels.matmul_efficiency" in capsys.readouterr().out
    assert str(runs[0]) in file.read_text()
    config = run_config(Source(("cluster=mine",), str(tmp_path / "conf")))
    assert config.cluster.name == "mine"
    assert config.cluster.measured


def test_what_is_no_measured_run_is_refused(runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", str(tmp_path)]) == 2
    assert "it must be the folder of a finished run" in capsys.readouterr().err
    write_json(runs[0] / RESULT_FILE, {})
    assert main(["calibrate", str(runs[0])]) == 2
    assert "its steps were not measured" in capsys.readouterr().err
