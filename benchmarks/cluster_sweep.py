"""Twelve points on a real Slurm cluster, six of which meet with trouble: none is lost, and each failure has its true cause.

    eval "$(slurm/dev-cluster up --nodes 4)"; python benchmarks/cluster_sweep.py [--json FILE] [--keep FOLDER]

Layouts need 1, 2 and 4 nodes. One point raises on rank 1, one asks for more memory than there is, one reaches its time limit and
may not go on; one reaches its time limit, one is preempted, one loses a node to a power cut (started again later): these go on.
The sweep must end with code 5, all points accounted for, 9 with results, nothing left running, no file left half-written.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from tests.support.wandb_files import history, runs  # noqa: E402

CLUSTER = ROOT / "slurm" / "dev-cluster"
NAME = "twelve"
_LIMIT_SECONDS = 560.0

SWEEP = """# @package _global_
defaults:
  - override /hydra/sweeper: grid
  - override /hydra/launcher: slurm
name: twelve
trainer: {max_epochs: -1, max_steps: 20, log_every_n_steps: 1, accelerator: cpu}
callbacks: {checkpoint: {every_n_train_steps: 5}}
model: {step_seconds: 0.2}
hydra:
  launcher: {time: 5, poll_seconds: 0.5, max_parallel: 5, sbatch: {exclude: node1}}
  sweeper:
    points:
      - {strategy: single, cluster.num_nodes: 1, model.kind: limit, trainer.max_steps: 100000,
         hydra.launcher.time: 1, hydra.launcher.signal_seconds: 10, hydra.launcher.max_requeues: 0}
      - {strategy: single, cluster.num_nodes: 1, model.kind: preempted, trainer.max_steps: 60,
         hydra.launcher.partition: preemptible, hydra.launcher.sbatch: {exclude: null, nodelist: node1}}
      - {strategy: dp2, cluster.num_nodes: 2, model.kind: power, trainer.max_steps: 60,
         hydra.launcher.sbatch: {exclude: null, nodelist: 'node[3-4]'}}
      - {strategy: dp2_zero1, cluster.num_nodes: 2, model.kind: raise}
      - {strategy: single, cluster.num_nodes: 1, model.kind: memory, model.rank: 0}
      - {strategy: single, cluster.num_nodes: 1, model.kind: long, trainer.max_steps: 150,
         hydra.launcher.time: 1, hydra.launcher.signal_seconds: 20}
      - {strategy: dp2_zero2, cluster.num_nodes: 1, model.kind: good}
      - {strategy: dp2, cluster.num_nodes: 2, model.kind: good}
      - {strategy: dp2_zero3, cluster.num_nodes: 2, model.kind: good}
      - {strategy: pp2, cluster.num_nodes: 2, model.kind: good}
      - {strategy: single, strategy.data_parallel_size: 4, cluster.num_nodes: 4, model.kind: good,
         hydra.launcher.sbatch: {exclude: null}}
      - {strategy: zero1, strategy.data_parallel_size: 4, cluster.num_nodes: 4, model.kind: good,
         hydra.launcher.sbatch: {exclude: null}}
"""
GOING_ON = ("long", "preempted", "power")
"""Kinds of points that are stopped and end well."""

CAUSES = {
    "raise": ("failed", "rank 1: ValueError: made to fail"),
    "memory": ("oom", "allocate"),
    "limit": ("timeout", "it reached its time limit"),
}
"""Kind of point -> state that it must end in, and words of its reason."""


class Watched:
    """The sweep's command, and what its folder says meanwhile."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.points = folder, folder / "outputs" / "sweeps" / NAME
        configurations = folder / "configurations" / "sweeps"
        configurations.mkdir(parents=True)
        (configurations / "twelve.yaml").write_text(SWEEP)
        command = ["train", "-m", "--config-dir", str(configurations.parent), "sweeps=twelve", "logger=csv_wandb"]
        command += ["model._target_=tests.cluster.unruly.Unruly", "data._target_=tests.cluster.unruly.UnrulyData"]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src"), *sys.path])}
        environment["WANDB_MODE"] = "offline"
        self.log = (folder / "said.txt").open("w")
        full = [sys.executable, "-m", "hybrid_strategy.cli.main", *command]
        self.process = subprocess.Popen(full, cwd=folder, env=environment, stdout=self.log, stderr=subprocess.STDOUT)
        self.deadline = time.monotonic() + _LIMIT_SECONDS

    def folder_of(self, kind: str) -> Path | None:
        """That of the point of this kind, once there is one."""
        for path in self.points.glob("*/point.json"):
            swept = {key.lstrip("+"): value for key, value in _json(path).get("swept", {}).items()}
            if swept.get("model.kind") == kind:
                return path.parent
        return None

    def of(self, kind: str, file: str) -> dict[str, Any]:
        """A file of the point of this kind."""
        folder = self.folder_of(kind)
        return _json(folder / file) if folder else {}

    def until(self, true: Callable[[], object]) -> None:
        while not true():
            if time.monotonic() > self.deadline or self.process.poll() is not None:
                raise TimeoutError(f"the sweep did not come that far:\n{(self.folder / 'said.txt').read_text()[-3000:]}")
            time.sleep(0.2)

    def until_step(self, kind: str, step: int) -> None:
        self.until(lambda: int(self.of(kind, "status.json").get("step", 0)) >= step)


def _json(path: Path) -> dict[str, Any]:
    try:
        value: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return value


def trouble(sweep: Watched) -> None:
    """Preempts one point, and cuts the power of a node of another until Slurm has noticed."""
    sweep.until_step("preempted", 4)
    slurm("sbatch", "--partition=main", "--nodelist=node1", "--exclusive", "--output=/dev/null", "--wrap=sleep 2")
    sweep.until_step("power", 8)
    job = str(sweep.of("power", "state.json")["job"])
    subprocess.run([CLUSTER, "kill-node", "node4"], check=True, capture_output=True)
    try:
        sweep.until(lambda: slurm("squeue", "-h", "-j", job, "-o", "%T").strip() == "PENDING")
    finally:
        subprocess.run([CLUSTER, "start-node", "node4"], check=True, capture_output=True)


def slurm(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def checks(sweep: Watched, code: int, seconds: float) -> list[tuple[str, object, object]]:
    """(what, found, wanted)"""
    rows = json.loads((sweep.points / "results.json").read_text())["results"]
    kinds = {kind: sweep.of(kind, "result.json") for kind in (*CAUSES, *GOING_ON)}
    true = sum(each["state"] == CAUSES[kind][0] and CAUSES[kind][1] in each["reason"] for kind, each in list(kinds.items())[:3])
    raised, state = kinds["raise"], sweep.of("raise", "state.json")
    noticed = float(state["ended"]) - float(raised["reason"].rpartition(" ")[2])
    went_on = sum(kinds[kind]["state"] == "ok" and kinds[kind]["attempts"] > 1 for kind in GOING_ON)
    broken = [path for path in sweep.points.rglob("*.json") if not _json(path)] + list(sweep.points.rglob("*.partial"))
    left = slurm("squeue", "--noheader", "--states=running,pending") + processes(sweep.folder)
    return [
        ("points accounted for", sum(row["state"] in ("ok", "failed", "oom", "timeout") for row in rows), 12),
        ("points with results", sum(row["state"] == "ok" for row in rows), 9),
        ("failures with their true cause", true, 3),
        ("stopped points that went on", went_on, len(GOING_ON)),
        ("steps twice or never", sum(_steps_are_wrong(sweep, row) for row in rows if row["state"] == "ok"), 0),
        ("... or in W&B, of those that saved", sum(_wandb_is_wrong(sweep, kind) for kind in ("long", "preempted")), 0),
        ("exit code", code, 5),
        ("left running", len(left.split("\n")) - 1, 0),
        ("files left half-written", len(broken), 0),
        ("traceback is reported after, s", round(noticed, 1), "< 10"),
        ("whole sweep, s", round(seconds), ""),
    ]


def processes(folder: Path) -> str:
    """Living processes that speak of the sweep's folder."""
    return subprocess.run(["pgrep", "-af", f"slurm_rank .*{folder}"], capture_output=True, text=True, check=False).stdout


def _steps_are_wrong(sweep: Watched, row: dict[str, Any]) -> bool:
    with (sweep.points / row["point"] / "metrics.csv").open() as file:
        steps = [int(line["step"]) for line in csv.DictReader(file) if line["train_loss"]]
    return steps != list(range(row["max_steps"]))


def _wandb_is_wrong(sweep: Watched, kind: str) -> bool:
    """One run in parts, which together have every step once."""
    parts = runs(sweep.folder_of(kind) or sweep.points)
    rows = [row for part in parts for row in history(part, patience_seconds=0.0)]
    steps = [row["trainer/global_step"] for row in rows if "train_loss" in row]
    wanted = list(range(sweep.of(kind, "result.json").get("steps", -1)))  # a point that was put back too often has no result
    return len({part.name.split("-")[3] for part in parts}) != 1 or steps != wanted


def main() -> int:
    """Runs the sweep with its trouble and prints what is found beside what is wanted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--keep", type=Path, help="where the sweep's folder is made and stays")
    given = parser.parse_args()
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        sweep = Watched((given.keep or Path(temporary)).resolve())
        try:
            trouble(sweep)
            code = sweep.process.wait(max(1.0, sweep.deadline - time.monotonic()))
        finally:
            sweep.process.kill()
            sweep.log.close()
        print((sweep.folder / "said.txt").read_text())
        found = checks(sweep, code, time.monotonic() - started)
    good = [wanted == "" or (value < 10 if wanted == "< 10" else value == wanted) for _, value, wanted in found]  # type: ignore[operator]
    for (what, value, wanted), fine in zip(found, good, strict=True):
        print(f"{what:<34} {value!s:>6}   {f'of {wanted}' if wanted != '' else '':<8} {'' if fine else 'WRONG'}")
    if given.json:
        figures = [{"name": what, "value": value, "unit": "", "goal": wanted} for what, value, wanted in found]
        given.json.write_text(json.dumps(figures, indent=2))
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
