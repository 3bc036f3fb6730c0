"""Points as jobs of a real Slurm: what is submitted, how they end, how they go on. Needs `slurm/dev-cluster up`."""

from __future__ import annotations

import csv
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(600)]

_CLUSTER = Path(__file__).resolve().parents[2] / "slurm" / "dev-cluster"
_BASE = (
    "model._target_=unruly.Unruly",
    "data._target_=unruly.UnrulyData",
    "logger=csv",
    "trainer.accelerator=cpu",
    "trainer.log_every_n_steps=1",
    "hydra/launcher=slurm",
    "hydra.launcher.time=10",
    "strategy=dp2",
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "unruly.py").write_text((Path(__file__).parent / "unruly.py").read_text())
    return tmp_path


def _hybrid(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    paths = os.pathsep.join([str(folder), *sys.path])
    environment = {**os.environ, "PYTHONPATH": paths, "HYBRID_STRATEGY_CACHE": str(folder / "cache")}
    command = [sys.executable, "-m", "hybrid_strategy.cli.main", *arguments]
    return subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def _sweep(folder: Path, *overrides: str) -> tuple[int, str]:
    process = _hybrid(folder, "train", "-m", *_BASE, *overrides)
    text = process.communicate(timeout=500)[0]
    return process.returncode, text


def _read(folder: Path, point: str, file: str) -> dict[str, object]:
    path = folder / "outputs" / "sweeps" / "s" / point / file
    value: dict[str, object] = json.loads(path.read_text()) if path.exists() else {}
    return value


def _steps(folder: Path, point: str) -> list[int]:
    with (folder / "outputs" / "sweeps" / "s" / point / "metrics.csv").open() as file:
        return [int(row["step"]) for row in csv.DictReader(file) if row["train_loss"]]


def _until(true: Callable[[], object], seconds: float = 180.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.3)


def _slurm(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _step_of(folder: Path, point: str) -> int:
    return int(str(_read(folder, point, "status.json").get("step", 0)))


def test_each_point_gets_the_nodes_of_its_layout_and_ends_with_its_true_cause(folder: Path):
    code, text = _sweep(
        folder, "name=s", "model.kind=good,raise,memory,die", "trainer.max_steps=5", "hydra.launcher.max_parallel=2"
    )
    assert code == 5, text
    states = {kind: _read(folder, f"kind-{kind}", "result.json") for kind in ("good", "raise", "memory", "die")}
    assert {kind: each["state"] for kind, each in states.items()} == {
        "good": "ok",
        "raise": "failed",
        "memory": "oom",
        "die": "failed",
    }
    assert re.match(r"rank 1: ValueError: made to fail", str(states["raise"]["reason"]))
    assert "raise ValueError" in str(states["raise"]["traceback"])
    assert "allocate" in str(states["memory"]["reason"])
    assert states["die"]["reason"] == "rank 1: Exited with exit code 7"
    failed_at = float(str(states["raise"]["reason"]).rpartition(" ")[2])
    assert float(str(_read(folder, "kind-raise", "state.json")["ended"])) - failed_at < 10
    assert not _slurm("squeue", "--noheader", "--me", "--states=running,pending")
    assert not list(folder.rglob("*.partial"))


def test_layouts_take_as_many_nodes_as_they_need(folder: Path):
    code, text = _sweep(
        folder, "name=s", "cluster.num_nodes=1,2", "trainer.max_steps=3", 'model.text="a $HOME `id` it\'s \\"q\\" é"'
    )
    assert code == 0, text
    for point, nodes in (("nodes1", 1), ("nodes2", 2)):
        script = (folder / "outputs/sweeps/s" / point / "slurm/job.sh").read_text()
        assert f"#SBATCH --nodes={nodes}\n" in script
        said = (folder / "outputs/sweeps/s" / point / "logs/rank1.log").read_text()
        assert "text is 'a $HOME `id` it\\'s \"q\" é'" in said


@pytest.mark.parametrize("kind", ["good", "slow"])
def test_a_run_stopped_from_outside_goes_on_where_it_was(folder: Path, kind: str):
    """`scontrol requeue`, with even ranks and with one that is a step behind the others."""
    process = _hybrid(
        folder,
        "train",
        "-m",
        *_BASE,
        "name=s",
        "seed=1",
        f"model.kind={kind}",
        "model.at=0",
        "model.step_seconds=0.3",
        "trainer.max_steps=40" if kind == "slow" else "trainer.max_steps=90",
    )
    _until(lambda: _step_of(folder, "dp2") >= 3)
    _slurm("scontrol", "requeue", str(_read(folder, "dp2", "state.json")["job"]))
    text = process.communicate(timeout=400)[0]
    assert process.returncode == 0, text
    state, steps = _read(folder, "dp2", "state.json"), _steps(folder, "dp2")
    assert (state["attempt"], state["requeues"], state["state"]) == (2, 1, "ok")
    assert steps == list(range(len(steps))), "a step twice or never"
    assert "resuming from" in (folder / "outputs/sweeps/s/dp2/slurm/batch.log").read_text()
    assert len(list((folder / "outputs/sweeps/s/dp2/checkpoints").glob("preempted-*"))) == 1


def test_a_preempted_run_saves_and_goes_on(folder: Path):
    process = _hybrid(
        folder,
        "train",
        "-m",
        *_BASE,
        "name=s",
        "seed=1",
        "cluster.num_nodes=2",
        "model.step_seconds=0.3",
        "trainer.max_steps=60",
        "hydra.launcher.partition=preemptible",
    )
    _until(lambda: _step_of(folder, "dp2") >= 3)
    _slurm("sbatch", "--partition=main", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 2")
    text = process.communicate(timeout=400)[0]
    assert process.returncode == 0, text
    state, steps = _read(folder, "dp2", "state.json"), _steps(folder, "dp2")
    assert state["state"] == "ok"
    assert int(str(state["requeues"])) >= 1
    assert steps == list(range(60))


def test_a_time_limit_is_survived_until_there_were_too_many(folder: Path):
    code, text = _sweep(
        folder,
        "name=s",
        "seed=1",
        "model.step_seconds=0.3",
        "trainer.max_steps=1000",
        "hydra.launcher.time=1",
        "hydra.launcher.signal_seconds=30",
        "hydra.launcher.max_requeues=1",
    )
    assert code == 5, text
    result = _read(folder, "dp2", "result.json")
    assert result["state"] in ("preempted", "timeout")
    assert result["attempts"] == 2


def test_a_killed_node_is_survived(folder: Path):
    process = _hybrid(
        folder,
        "train",
        "-m",
        *_BASE,
        "name=s",
        "seed=1",
        "cluster.num_nodes=2",
        "model.step_seconds=0.3",
        "trainer.max_steps=60",
        "callbacks.checkpoint.every_n_train_steps=5",
    )
    try:
        _until(lambda: _step_of(folder, "dp2") >= 7)
        subprocess.run([_CLUSTER, "kill-node", "node2"], check=True, capture_output=True)
        _until(lambda: int(str(_read(folder, "dp2", "state.json").get("requeues", 0))) or _slurm("squeue", "-h", "-t", "PD"))
    finally:
        subprocess.run([_CLUSTER, "start-node", "node2"], check=True, capture_output=True)
    text = process.communicate(timeout=400)[0]
    assert process.returncode == 0, text
    state, steps = _read(folder, "dp2", "state.json"), _steps(folder, "dp2")
    assert (state["state"], state["attempt"]) == ("ok", 2)
    assert steps == list(range(60))


def test_detached_jobs_are_seen_cancelled_and_resumed_from_any_shell(folder: Path):
    code, text = _sweep(
        folder,
        "name=s",
        "seed=1,2",
        "model.step_seconds=0.3",
        "trainer.max_steps=30",
        "hydra.launcher.wait=false",
        "hydra.launcher.max_parallel=1",
    )
    assert code == 0, text
    assert "submitted; it goes on without this command" in text
    again, text = _sweep(
        folder,
        "name=s",
        "seed=1,2",
        "model.step_seconds=0.3",
        "trainer.max_steps=30",
        "hydra.launcher.wait=false",
        "hydra.launcher.max_parallel=1",
    )
    assert again == 0, text
    assert len(_slurm("squeue", "--noheader", "--array", "--me").splitlines()) == 2
    process = _hybrid(folder, "sweep", "cancel", "s", "seed-2")
    assert process.communicate(timeout=60)[0].strip() == "1 cancelled"
    _until(lambda: _read(folder, "seed-1", "result.json").get("state") == "ok")
    process = _hybrid(folder, "sweep", "status", "s", "--json")
    results = {each["point"]: each["state"] for each in json.loads(process.communicate(timeout=60)[0])["results"]}
    assert results == {"seed-1": "ok", "seed-2": "cancelled"}
    assert process.returncode == 5


def test_a_dry_run_prints_the_scripts_and_leaves_nothing(folder: Path):
    code, text = _sweep(folder, "name=s", "seed=1,2", "hydra.launcher.dry_run=true")
    assert code == 0
    assert text.count("#SBATCH --ntasks-per-node=2") == 2
    assert text.count("srun --kill-on-bad-exit=1") == 2
    assert not (folder / "outputs").exists()


def test_what_slurm_refuses_is_one_clear_error(folder: Path):
    code, text = _sweep(folder, "name=s", "seed=1", "hydra.launcher.partition=nowhere")
    assert code == 2
    assert "Slurm refuses the job, nothing was submitted" in text
    assert "partition" in text
