"""Points as jobs of a real Slurm: what is submitted, how they end, how they go on. Needs `slurm/dev-cluster up --nodes 4`."""

from __future__ import annotations

import csv
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.wandb_files import history, runs

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(300)]

_HERE = Path(__file__).resolve().parent
_CLUSTER = _HERE.parents[1] / "slurm" / "dev-cluster"
_TEXT = 'a $HOME `id` it\'s "q" é %j'
_BASE = (
    "model._target_=unruly.Unruly",
    "data._target_=unruly.UnrulyData",
    "logger=csv",
    "trainer.accelerator=cpu",
    "trainer.log_every_n_steps=1",
    "hydra/launcher=slurm",
    "hydra.launcher.time=10",
    "hydra.launcher.poll_seconds=0.5",
    "name=s",
)


class Sweep:
    """Commands in a folder of their own, and what they leave there."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.points = folder, folder / "outputs" / "sweeps" / "s"
        self.started: list[subprocess.Popen[str]] = []
        (folder / "unruly.py").write_text((_HERE / "unruly.py").read_text())

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        paths = os.pathsep.join([str(self.folder), *sys.path])
        environment = {**os.environ, "PYTHONPATH": paths, "HYBRID_STRATEGY_CACHE": str(self.folder / "cache")}
        command = [sys.executable, "-m", "hybrid_strategy.cli.main", *arguments]
        process = subprocess.Popen(
            command, cwd=self.folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.started.append(process)
        return process

    def sweep(self, *overrides: str) -> subprocess.Popen[str]:
        return self.start("train", "-m", *_BASE, *overrides)

    def run(self, *arguments: str) -> tuple[int, str]:
        process = self.start(*arguments)
        text = process.communicate(timeout=250)[0]
        return process.returncode, text

    def read(self, point: str, file: str = "result.json") -> dict[str, Any]:
        path = self.points / point / file
        value: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        return value

    def until(self, true: Callable[[], object], seconds: float = 120.0) -> None:
        """Waits while the command that was started goes on."""
        deadline = time.monotonic() + seconds
        while not true():
            assert time.monotonic() < deadline, "waited too long"
            assert self.started[-1].poll() is None, self.started[-1].communicate()[0]
            time.sleep(0.2)

    def until_step(self, point: str, step: int) -> None:
        self.until(lambda: int(self.read(point, "status.json").get("step", 0)) >= step)

    def steps(self, point: str) -> list[int]:
        with (self.points / point / "metrics.csv").open() as file:
            return [int(row["step"]) for row in csv.DictReader(file) if row["train_loss"]]


@pytest.fixture
def sweep(tmp_path: Path) -> Iterator[Sweep]:
    made = Sweep(tmp_path)
    yield made
    _slurm("scancel", "--user=root")
    for process in made.started:
        if process.poll() is None:
            process.kill()
            process.communicate()


def _slurm(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_each_point_gets_the_nodes_of_its_layout_and_ends_with_its_true_cause(sweep: Sweep):
    """One rank on one node ends well; of two ranks on two nodes the second raises."""
    text = _TEXT.replace('"', '\\"')
    process = sweep.sweep("cluster.num_nodes=1,2", "model.kind=raise", "trainer.max_steps=5", f'model.text="{text}"')
    said = process.communicate(timeout=250)[0]
    assert process.returncode == 5, said
    scripts = {name: (sweep.points / name / "slurm/job.sh").read_text() for name in ("nodes1", "nodes2")}
    for name, nodes in (("nodes1", 1), ("nodes2", 2)):
        assert f"#SBATCH --nodes={nodes}\n" in scripts[name]
        assert f"text is {_TEXT!r}" in (sweep.points / name / f"logs/rank{nodes - 1}.log").read_text()
    assert sweep.read("nodes1")["state"] == "ok"
    failed = sweep.read("nodes2")
    assert (failed["state"], failed["rank"]) == ("failed", 1)
    assert re.match(r"rank 1: ValueError: made to fail", failed["reason"])
    assert "raise ValueError" in failed["traceback"]
    assert failed["reason"] in said
    at = float(failed["reason"].rpartition(" ")[2])
    assert sweep.read("nodes2", "state.json")["ended"] - at < 10
    assert "\x1b" not in (sweep.points / "nodes1/slurm/batch.log").read_text(), "a log is no terminal"
    assert not _slurm("squeue", "--noheader", "--me", "--states=running,pending")
    assert not list(sweep.folder.rglob("*.partial"))
    for name in ("results.csv", "results.json", "report.html"):
        assert (sweep.points / name).stat().st_size


def test_a_rank_that_raises_before_its_peers_know_it_ends_them(sweep: Sweep):
    """The first rank waits for the second to come, and hears no signal meanwhile."""
    process = sweep.sweep("seed=1", "cluster.num_nodes=2", "model.kind=early", "trainer.max_steps=5")
    said = process.communicate(timeout=250)[0]
    assert process.returncode == 5, said
    failed = sweep.read("dp2")
    assert (failed["state"], failed["rank"]) == ("failed", 1)
    assert "raise ValueError" in failed["traceback"]
    assert sweep.read("dp2", "state.json")["ended"] - float(failed["reason"].rpartition(" ")[2]) < 10


def test_a_task_of_an_array_is_requeued_and_another_cancelled(sweep: Sweep):
    """Two tasks of one array: one goes on where it was, the other saves and does not come back."""
    process = sweep.sweep("seed=1,2", "strategy=single", "model.step_seconds=0.5", "trainer.max_steps=15")
    sweep.until_step("seed-1", 3)
    job = sweep.read("seed-1", "state.json")["job"]
    assert "_" in job
    _slurm("scontrol", "requeue", job)
    sweep.until_step("seed-2", 5)
    _slurm("scancel", sweep.read("seed-2", "state.json")["job"])
    text = process.communicate(timeout=250)[0]
    assert process.returncode == 5, text
    requeued, other = sweep.read("seed-1", "state.json"), sweep.read("seed-2", "state.json")
    assert (requeued["attempt"], requeued["requeues"], requeued["state"]) == (2, 1, "ok")
    assert (other["attempt"], other["requeues"], other["state"]) == (1, 0, "cancelled")
    assert other["reason"].startswith("cancelled: stopped by SIGTERM, saved at step ")
    assert other["job"].partition("_")[0] == job.partition("_")[0]
    assert sweep.steps("seed-1") == list(range(15)), "a step twice or never"
    assert "resuming from" in (sweep.points / "seed-1/slurm/batch.log").read_text()


def test_a_preempted_run_saves_and_goes_on(sweep: Sweep):
    """Its second rank is a step behind the first one when the signal comes."""
    process = sweep.sweep(
        "seed=1",
        "cluster.num_nodes=2",
        "model.kind=slow",
        "model.at=0",
        "trainer.max_steps=20",
        "hydra.launcher.partition=preemptible",
        "logger=csv_wandb",
        "hydra.launcher.sbatch={nodelist: 'node[1-2]'}",
    )
    sweep.until_step("dp2", 3)
    _slurm("sbatch", "--partition=main", "--nodelist=node[1-2]", "--exclusive", "--output=/dev/null", "--wrap=sleep 2")
    text = process.communicate(timeout=250)[0]
    assert process.returncode == 0, text
    state = sweep.read("dp2", "state.json")
    assert (state["state"], state["attempt"], state["requeues"]) == ("ok", 2, 1)
    assert sweep.steps("dp2") == list(range(20))
    parts = runs(sweep.points / "dp2")
    assert len({path.name.split("-")[3] for path in parts}) == 1, "one W&B run in parts"
    rows = [row for path in parts for row in history(path, patience_seconds=0.0)]
    assert [row["trainer/global_step"] for row in rows if "train_loss" in row] == list(range(20)), "a step twice or never"
    assert "wandb sync --append" in text


def test_a_node_without_power_is_survived(sweep: Sweep):
    process = sweep.sweep(
        "seed=1",
        "cluster.num_nodes=2",
        "model.step_seconds=0.2",
        "trainer.max_steps=30",
        "callbacks.checkpoint.every_n_train_steps=5",
        "hydra.launcher.sbatch={nodelist: 'node[3-4]'}",
    )
    try:
        sweep.until_step("dp2", 7)
        subprocess.run([_CLUSTER, "kill-node", "node4"], check=True, capture_output=True)
        sweep.until(lambda: "dp2" in _slurm("squeue", "-h", "-t", "PD", "-o", "%j"))
    finally:
        subprocess.run([_CLUSTER, "start-node", "node4"], check=True, capture_output=True)
    text = process.communicate(timeout=250)[0]
    assert process.returncode == 0, text
    state = sweep.read("dp2", "state.json")
    assert (state["state"], state["attempt"]) == ("ok", 2)
    assert sweep.steps("dp2") == list(range(30))


def test_detached_jobs_are_seen_cancelled_and_resumed_from_any_shell(sweep: Sweep):
    """Jobs that are held: nothing of this needs them to run."""
    held = (*_BASE, "hydra.launcher.wait=false", "hydra.launcher.sbatch={hold: true}")
    command = ("train", "-m", *held, "seed=1,2,3")
    code, text = sweep.run(*command)
    assert code == 0, text
    assert "submitted; it goes on without this command" in text
    jobs = _slurm("squeue", "--noheader", "--array", "--me", "--format=%i").split()
    assert len(jobs) == 3
    code, text = sweep.run(*command)
    assert code == 0, text
    assert _slurm("squeue", "--noheader", "--array", "--me", "--format=%i").split() == jobs, "what waits is not submitted again"
    assert sweep.run("sweep", "cancel", "s", "seed-2") == (0, "1 cancelled\n")
    _slurm("scancel", sweep.read("seed-3", "state.json")["job"])  # of a task that never began Slurm keeps nothing
    code, text = sweep.run("sweep", "status", "s", "--json")
    assert code == 5
    found = {each["point"]: (each["state"], each["reason"]) for each in json.loads(text)["results"]}
    assert found["seed-1"] == ("pending", "waiting: JobHeldUser; it will not start as it is")
    assert found["seed-2"][0] == "cancelled"
    assert found["seed-3"] == ("cancelled", "cancelled while it waited")
    assert sweep.run("sweep", "resume", "s")[0] == 0
    again = _slurm("squeue", "--noheader", "--array", "--me", "--format=%i").split()
    assert len(again) == 3
    assert sweep.read("seed-1", "state.json")["job"] in jobs
    assert "of an earlier command, and still alive: seed-3" in sweep.run("train", "-m", *held, "seed=1,2")[1]
    here = [each for each in held if not each.startswith(("hydra/", "hydra.launcher"))]
    code, text = sweep.run("train", "-m", *here, "seed=1,2")
    assert code == 2
    assert "hydra/launcher is 'local': a job of Slurm that waits or runs has the point's folder" in text
    assert sweep.run("sweep", "cancel", "s") == (0, "3 cancelled\n")
    assert str(sweep.points / "report.html") in sweep.run("sweep", "report", "s")[1]
    code, text = sweep.run("sweep", "logs", "s", "seed-1")
    assert (code, text) == (0, f"==> {sweep.points / 'seed-1/slurm/batch.log'}\n(nothing yet)\n")


def test_a_run_that_is_submitted_by_hand(sweep: Sweep):
    """Its nodes and tasks are those of the job; a layout that does not fit them is refused before a rank starts."""
    script = _CLUSTER.with_name("train.sbatch")
    own = [each for each in _BASE if not each.startswith(("hydra", "name"))]
    environment = {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": os.pathsep.join([str(sweep.folder), *sys.path])}
    command = ["sbatch", "--parsable", "--wait", "--ntasks-per-node=1", str(script), *own, "trainer.max_steps=3"]
    said = [
        subprocess.run([*command, *more], cwd=sweep.folder, env=environment, capture_output=True, text=True, check=False)
        for more in ([f"model.text='{_TEXT.replace(chr(39), chr(92) + chr(39))}'"], ["strategy=dp2"])
    ]
    good, refused = (sweep.folder / "outputs/train" / each.stdout.strip() for each in said)
    assert [each.returncode for each in said] == [0, 2]
    assert json.loads((good / "result.json").read_text())["state"] == "ok"
    assert f"text is {_TEXT!r}" in (good / "logs/rank0.log").read_text()
    assert "strategy.data_parallel_size" in (refused / "slurm/batch.log").read_text()
    assert not (refused / "logs").exists()


def test_a_dry_run_prints_the_scripts_and_what_slurm_refuses_is_one_clear_error(sweep: Sweep):
    code, text = sweep.run("train", "-m", *_BASE, "seed=1,2", "cluster.devices=2", "hydra.launcher.dry_run=true")
    assert code == 0
    assert text.count("#SBATCH --ntasks-per-node=2") == 2
    assert text.count("srun --kill-on-bad-exit=1") == 2
    assert not (sweep.folder / "outputs").exists()
    code, text = sweep.run("train", "-m", *_BASE, "seed=1", "hydra.launcher.partition=nowhere")
    assert code == 2
    assert "Slurm refuses the job, nothing was submitted" in text
    assert "partition" in text


def test_submitit_within_the_limits_that_are_documented(sweep: Sweep):
    """The command of `slurm/README.md`: a job on one node for each point, which starts its ranks there itself."""
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher", reason="pip install 'hybrid-strategy[submitit]'")
    own = [each for each in _BASE if "hydra" not in each]
    launcher = [f"hydra.launcher.{each}" for each in ("nodes=1", "tasks_per_node=1", "timeout_min=5")]
    given = ("hydra/launcher=submitit_slurm", *launcher, "strategy=dp2", "trainer.max_steps=5", "model.kind=good,raise")
    code, text = sweep.run("train", "-m", *own, *given)
    assert code == 5, text
    assert text.count("ValueError: made to fail") == 1
    results = [json.loads(path.read_text()) for path in sweep.points.glob("*/result.json")]
    assert [each["steps"] for each in results] == [5]
    assert [len(each["ranks"]) for each in results] == [2]
