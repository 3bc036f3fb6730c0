"""A sweep beside the same runs started alone, one after the other: at most 1.10 x their sum.

    python benchmarks/sweep_overhead.py [--points N] [--steps N] [--rounds N] [--json FILE]

Both sides are the command line in fresh processes, with the same model, data and steps; they alternate, and so does who is first.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
GOAL = 1.10


def hybrid(folder: Path, *arguments: str) -> float:
    """Seconds of a command.

    Raises:
        RuntimeError: it did not end well.
    """
    paths = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    environment = {**os.environ, "PYTHONPATH": paths, "HYBRID_STRATEGY_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "hybrid_strategy.cli.main", "train", *arguments]
    started = time.monotonic()
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    return time.monotonic() - started


def one_round(folder: Path, number: int, base: list[str], seeds: list[str]) -> tuple[float, float]:
    """Seconds of the sweep, and of its runs alone."""

    def swept() -> float:
        return hybrid(folder, "-m", f"name=sweep{number}", f"seed={','.join(seeds)}", *base)

    def alone() -> float:
        return sum(hybrid(folder, f"name=alone{number}", f"seed={seed}", *base) for seed in seeds)

    if number % 2:
        second = alone()
        return swept(), second
    return swept(), alone()


def main() -> int:
    """Prints each round and the median ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=int, default=4)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    own = ["model._target_=tests.cli.own_module.OwnModule", "data._target_=tests.cli.own_module.OwnData"]
    base = [*own, "trainer=cpu", "strategy=dp2", "logger=csv", f"trainer.max_steps={given.steps}"]
    seeds = [str(number + 1) for number in range(given.points)]
    ratios = []
    with tempfile.TemporaryDirectory() as folder:
        hybrid(Path(folder), "name=warm", *base)
        for number in range(given.rounds):
            swept, alone = one_round(Path(folder), number, base, seeds)
            ratios.append(swept / alone)
            print(f"{given.points} points: sweep {swept:.1f} s, alone {alone:.1f} s, {ratios[-1]:.3f} x")
    found = statistics.median(ratios)
    print(f"median {found:.3f} x, goal at most {GOAL:.2f} x")
    if given.json:
        given.json.write_text(
            json.dumps([{"name": "sweep over runs alone", "value": found, "unit": "x", "goal": GOAL}], indent=2)
        )
    return 0 if found <= GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
