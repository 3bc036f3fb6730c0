"""A rank that raises, as our Slurm launcher and as submitit tell of it: how long until the user sees why.

    eval "$(slurm/dev-cluster up --nodes 2)"; python benchmarks/failing_rank.py [--submitit PYTHON] [--only KIND] [--json FILE]

The same module fails on the second of two nodes: in a training step, or before the ranks know each other. Through submitit it is
a Hydra application (`failing_rank_app.py`) under `hydra/launcher=submitit_slurm` with a time limit of one minute; where it waits
for that, it waits for an hour under its default. Without `hydra-submitit-launcher` this half is left out.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
GOAL_SECONDS = 10.0
KINDS = {"raise": "in a training step", "early": "before the process group"}
"""Kind of `tests/cluster/unruly.py` -> when the rank raises."""

_RAISED = re.compile(r"made to fail at ([\d.]+)")
_ERROR = "ValueError: made to fail"
_FRAME = "raise ValueError(words)"
_LIMIT_SECONDS = 420.0


@dataclass(frozen=True)
class Told:
    """What a command said of the failure; seconds are counted from the moment at which the rank raised.

    Attributes:
        error: until the rank's own error is on the terminal; None: it never is.
        traceback: until its traceback is there to be read, on the terminal or in a file; None: it never is.
        ended: until the command returns.
        code: with which it returns.
        last: its last line.
    """

    error: float | None
    traceback: float | None
    ended: float
    code: int
    last: str


def ours(python: str, folder: Path, kind: str) -> Told:
    """`hybrid train hydra/launcher=slurm`, as a user would type it; the traceback is in `result.json`."""
    own = ["model._target_=tests.cluster.unruly.Unruly", "data._target_=tests.cluster.unruly.UnrulyData", f"model.kind={kind}"]
    layout = ["cluster.num_nodes=2", "strategy=dp2", "trainer.accelerator=cpu", "trainer.max_steps=100", "logger=csv"]
    launcher = ["hydra/launcher=slurm", "hydra.launcher.time=10", f"paths.run_dir={folder}/run"]
    command = [python, "-m", "hybrid_strategy.cli.main", "train", *launcher, *own, *layout]
    return _watched(command, folder, lambda: [folder / "run" / "result.json"])


def submitit(python: str, folder: Path, kind: str) -> Told:
    """The application under `hydra/launcher=submitit_slurm`; the traceback may be in a log of a task."""
    launcher = [f"hydra.launcher.{each}" for each in ("nodes=2", "tasks_per_node=1", "timeout_min=1")]
    places = [f"hydra.sweep.dir={folder}/sweep", f"hydra.launcher.submitit_folder={folder}/logs"]
    application = [str(ROOT / "benchmarks/failing_rank_app.py"), "-m", "hydra/launcher=submitit_slurm"]
    command = [python, *application, *launcher, *places, f"+kind={kind}"]
    return _watched(command, folder, lambda: list((folder / "logs").glob("*_log.*")))


def _watched(command: list[str], folder: Path, traces: Callable[[], list[Path]]) -> Told:
    """Runs the command and looks ten times a second at what it has said and left."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "HYBRID_STRATEGY_CACHE": str(folder / "cache")}
    said = folder / "said.txt"
    seen: dict[str, float] = {}
    deadline = time.time() + _LIMIT_SECONDS

    def look() -> None:
        text = _text(said)
        if _ERROR in text:
            seen.setdefault("error", time.time())
        if any(_FRAME in each for each in (text, *map(_text, traces()))):
            seen.setdefault("traceback", time.time())

    with said.open("w") as out:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=out, stderr=subprocess.STDOUT)
        while process.poll() is None:
            look()
            if time.time() > deadline:
                process.kill()
            time.sleep(0.1)
    ended = time.time()
    look()
    raised = _raised(folder)
    error, traceback = (seen[key] - raised if key in seen else None for key in ("error", "traceback"))
    return Told(error, traceback, ended - raised, process.returncode, (_text(said).strip().splitlines() or [""])[-1])


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _raised(folder: Path) -> float:
    """When the rank raised: it says so in its own log.

    Raises:
        RuntimeError: it never came that far.
    """
    for path in folder.rglob("*"):
        found = _RAISED.search(_text(path)) if path.suffix in (".log", ".out", ".txt") else None
        if found is not None:
            return float(found[1])
    raise RuntimeError(f"no rank has raised:\n{_text(folder / 'said.txt')[-3000:]}")


def _has_submitit(python: str) -> bool:
    trial = [python, "-c", "import hydra_plugins.hydra_submitit_launcher"]
    return subprocess.run(trial, capture_output=True, check=False).returncode == 0


def main() -> int:
    """Runs each failure through each launcher and prints what was told, and when."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--submitit", default=sys.executable, metavar="PYTHON", help="with hydra-submitit-launcher (this one)")
    parser.add_argument("--only", choices=tuple(KINDS), help="only this failure")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    sides: dict[str, tuple[Callable[[str, Path, str], Told], str]] = {"hybrid": (ours, sys.executable)}
    if _has_submitit(given.submitit):
        sides["submitit"] = (submitit, given.submitit)
    else:
        print(f"submitit is left out: {given.submitit} has no hydra-submitit-launcher; pip install 'hybrid-strategy[submitit]'")
    figures, good = [], True
    print(f"{'through':<9} {'the rank raises':<26} {'its error':>10} {'traceback':>10} {'returns':>9} {'code':>5}  last line")
    for kind, when in KINDS.items() if given.only is None else [(given.only, KINDS[given.only])]:
        for name, (run, python) in sides.items():
            with tempfile.TemporaryDirectory() as folder:
                told = run(python, Path(folder), kind)
            print(_line(name, when, told), flush=True)
            good &= name != "hybrid" or (told.traceback or GOAL_SECONDS) < GOAL_SECONDS
            goal = GOAL_SECONDS if name == "hybrid" else None
            values = {"error": told.error, "traceback": told.traceback, "returns": told.ended}
            figures += [{"name": f"{name}, {when}: {what}", "value": v, "unit": "s", "goal": goal} for what, v in values.items()]
    if given.json:
        given.json.write_text(json.dumps(figures, indent=2))
    return 0 if good else 1


def _line(name: str, when: str, told: Told) -> str:
    error, traceback = (f"{each:.1f} s" if each is not None else "never" for each in (told.error, told.traceback))
    return f"{name:<9} {when:<26} {error:>10} {traceback:>10} {told.ended:>7.1f} s {told.code:>5}  {told.last[:90]}"


if __name__ == "__main__":
    sys.exit(main())
