"""How long a user waits for an answer that needs no run (configuration, refusal, plan), and what our import adds to Lightning's.

    python benchmarks/start_up.py [--rounds N] [--json FILE]

Each is a fresh process. Commands: wall-clock seconds from start to end, so the machine should be quiet; the median of the rounds
after one that only warms up. The import: processor seconds of a process that imports Lightning and this package less those of one
that imports Lightning alone, one after the other in each round; of each the least of the rounds, as noise only adds to it.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

HYBRID = "import sys; from hybrid_strategy.cli.main import main; sys.exit(main(sys.argv[1:]))"
PLAN = ("model=llama3_70b", "cluster=h100_sxm", "cluster.num_nodes=16", "data.global_batch_size=1024", "precision=bf16_mixed")
COMMANDS = {
    "hybrid train --cfg job": (("train", "--cfg", "job"), 0, 2.0),
    "refusal: unknown key": (("train", "trainer.max_step=3"), 2, 3.0),
    "refusal: sizes that do not fit": (("train", "strategy=tp2", "cluster.devices=3"), 2, 3.0),
    "refusal: more stages than layers": (("train", "model=llama_tiny", "strategy.pipeline_parallel_size=9"), 2, 3.0),
    "hybrid plan, 70B on 128 GPUs": (("plan", *PLAN), 0, 2.0),
}
IMPORT = "import beside Lightning's"
LIGHTNING = "import lightning.pytorch"
OURS = f"{LIGHTNING}, hybrid_strategy; hybrid_strategy.HybridParallelStrategy"


def seconds(code: str, *arguments: str, expected: int = 0, processor: bool = False) -> float:
    """Of one fresh process in an empty folder, which must end with the expected code."""
    clock = _of_children if processor else time.perf_counter
    with tempfile.TemporaryDirectory() as folder:
        began = clock()
        done = subprocess.run([sys.executable, "-c", code, *arguments], cwd=folder, capture_output=True, text=True, check=False)
        took = clock() - began
    if done.returncode != expected:
        raise SystemExit(f"exit code {done.returncode}, expected {expected}: {arguments}\n{done.stdout}{done.stderr}")
    return took


def _of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5, help="fresh processes of each (5)")
    parser.add_argument("--json", metavar="FILE", help="write the figures here")
    given = parser.parse_args(argv)
    measured: dict[str, list[float]] = {name: [] for name in (*COMMANDS, LIGHTNING, OURS)}
    for _ in range(1 + given.rounds):
        for name, (arguments, expected, _goal) in COMMANDS.items():
            measured[name].append(seconds(HYBRID, *arguments, expected=expected))
        for code in (LIGHTNING, OURS):
            measured[code].append(seconds(code, processor=True))
    goals = {name: goal for name, (_, _, goal) in COMMANDS.items()} | {IMPORT: 0.3}
    measured = {name: values[1:] for name, values in measured.items()}
    found = {name: median(measured[name]) for name in COMMANDS} | {IMPORT: min(measured[OURS]) - min(measured[LIGHTNING])}
    for name, value in found.items():
        spread = f"   ({min(measured[name]):.2f} to {max(measured[name]):.2f})" if name in measured else ""
        print(f"{name:<34} {value:6.2f} s   < {goals[name]:g}{spread}")
    if given.json:
        figures = [{"name": name, "value": value, "unit": "s", "goal": f"< {goals[name]:g}"} for name, value in found.items()]
        Path(given.json).write_text(json.dumps(figures, indent=2), encoding="utf-8")
    return 0 if all(value < goals[name] for name, value in found.items()) else 1


if __name__ == "__main__":
    sys.exit(main())
