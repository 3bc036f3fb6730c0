"""The gate on every layout of the first release: 20 AdamW steps of `llama_tiny` in fp32 beside one process, by `hybrid check`.

    python benchmarks/parity.py [--steps 20] [--only TEXT] [--json FILE]

Loss within 1e-6 relative at every step, gradients within 1e-5 of the largest in the model, first weights bit for bit. Two
to eight processes on one machine; about a quarter of a minute a layout on two cores, a minute for the last.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

LAYOUTS = (
    "dp2",
    "dp2_zero1",
    "dp2_zero2",
    "dp2_zero3",
    "tp2",
    "tp2_sp",
    "pp2_sequential",
    "pp2_gpipe",
    "pp2",
    "pp2_interleaved",
    "dp2_pp2",
    "dp2_pp2_zero2",
    "dp2_tp2",
    "tp2_pp2",
    "dp2_tp2_pp2",
)
"""Files of `conf/strategy`; `pp2` is 1F1B."""

RUN = ("model=llama_tiny", "data.sequence_length=32", "data.global_batch_size=8", "data.max_bytes=200000", "optimizer=adamw")
GOALS = {"initial weights": 0.0, "loss": 1e-6, "gradients": 1e-5}
"""The largest difference allowed, relative; the gate's own bounds are in the report of `hybrid check`."""


def measure(layout: str, steps: int) -> dict[str, Any]:
    """The report of `hybrid check` on one layout.

    Raises:
        RuntimeError: it printed none.
    """
    command = [sys.executable, "-m", "hybrid_strategy.cli.main", "check", "--json", f"strategy={layout}", f"check.steps={steps}"]
    done = subprocess.run([*command, *RUN], capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1):
        raise RuntimeError(f"{layout}: exit code {done.returncode}\n{done.stderr}")
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def figures(layout: str, report: dict[str, Any]) -> list[dict[str, Any]]:
    """The quantities that have a goal, and the gate's verdict over all it compares."""
    rows = {row["quantity"]: row for row in report["rows"]}
    found = [
        {"name": f"{layout}: {name}", "value": float(rows[name]["difference"]), "unit": "relative", "goal": f"<= {goal:g}"}
        for name, goal in GOALS.items()
    ]
    return [*found, {"name": f"{layout}: same", "value": float(report["same"]), "unit": "", "goal": "1"}]


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints; exit code 1 where a layout misses a goal."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps (20)")
    parser.add_argument("--only", default="", metavar="TEXT", help="layouts with this in their name")
    parser.add_argument("--json", metavar="FILE", help="write the figures here")
    given = parser.parse_args(argv)
    print(f"{'layout':<16} {'initial weights':>16} {'loss':>10} {'gradients':>10}  verdict")
    found: list[dict[str, Any]] = []
    good = True
    for layout in (each for each in LAYOUTS if given.only in each):
        *values, verdict = figures(layout, measure(layout, given.steps))
        within = all(each["value"] <= goal for each, goal in zip(values, GOALS.values(), strict=True))
        good = good and within and verdict["value"] == 1
        weights, loss, gradients = (each["value"] for each in values)
        text = "same" if within and verdict["value"] else "DIFFERENT"
        print(f"{layout:<16} {weights:>16.1g} {loss:>10.1e} {gradients:>10.1e}  {text}", flush=True)
        found += [*values, verdict]
    if given.json:
        Path(given.json).write_text(json.dumps(found, indent=2), encoding="utf-8")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
