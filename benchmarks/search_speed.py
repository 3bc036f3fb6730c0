"""How long the planner and the sweeper take to go through all layouts of 16,384 GPUs, in processor time of this process.

    python benchmarks/search_speed.py [--rounds N] [--json FILE]

Each round is a fresh process, as a command is: nothing is left over from the round before. The figure is the median.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median

SETUP = """
import time
from hybrid_strategy.planning.numerics import NUMERICS
from hybrid_strategy.spec.cluster import ClusterSpec
from hybrid_strategy.spec.model_shape import ModelShape
MODEL = ModelShape(16384, 126, 128, 53248, 128256, 8192, num_key_value_heads=8)
CLUSTER = ClusterSpec(num_nodes=2048)
"""
CODE = {
    "layout sweeper, every axis free": """
from hybrid_strategy.sweeping.axes import AXES, Axes
from hybrid_strategy.sweeping.layouts import Space, layouts
from hybrid_strategy.sweeping.pruning import Judge, prune
began = time.process_time()
found = list(layouts(Space(16384, Axes(free=AXES), 8, MODEL, 16384)))
prune(found, Judge(MODEL, CLUSTER, NUMERICS["mixed"]))
print(time.process_time() - began)
""",
    "planner, full search": """
from hybrid_strategy.planning.search import Question, search
began = time.process_time()
search(Question(MODEL, CLUSTER, 16384))
print(time.process_time() - began)
""",
}
GOALS = {"layout sweeper, every axis free": 3.0, "planner, full search": 1.0}


def seconds(name: str) -> float:
    """Of one fresh process."""
    done = subprocess.run([sys.executable, "-c", SETUP + CODE[name]], capture_output=True, text=True, check=True)
    return float(done.stdout)


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5, help="fresh processes of each (5)")
    parser.add_argument("--json", metavar="FILE", help="write the figures here")
    given = parser.parse_args(argv)
    found = {name: median(seconds(name) for _ in range(given.rounds)) for name in CODE}
    for name, value in found.items():
        print(f"{name:<34} {value:6.2f} s   < {GOALS[name]:g}")
    if given.json:
        figures = [{"name": name, "value": value, "unit": "s", "goal": f"< {GOALS[name]:g}"} for name, value in found.items()]
        Path(given.json).write_text(json.dumps(figures, indent=2), encoding="utf-8")
    return 0 if all(value < GOALS[name] for name, value in found.items()) else 1


if __name__ == "__main__":
    sys.exit(main())
