"""Forecast beside measured for the quickstart model's layouts on this machine. Run `hybrid doctor` first.

    python benchmarks/forecast.py [--runs 3] [--steps 24] [--json FILE]

Every layout is run several times, in turns, and the median run counts. Goal: step time within 15 %, peak memory within 10 %.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from hybrid_strategy.cli.doctor import measure
from hybrid_strategy.config.measured import MeasuredRun
from hybrid_strategy.planning.forecast import forecast
from hybrid_strategy.units import format_bytes, format_seconds

LAYOUTS = ("single", "dp2", "tp2", "pp2", "dp2_zero1", "dp2_zero3")
TIME_GOAL, MEMORY_GOAL = 0.15, 0.10


def measured(layout: str, folder: Path, steps: int) -> MeasuredRun:
    """One run of the quickstart in one layout."""
    micro = ("strategy.num_microbatches=4",) if "pp" in layout else ("strategy.num_microbatches=null",)
    limits = (f"trainer.max_steps={steps}", "trainer.val_check_interval=null")
    return measure(folder, ("experiment=quickstart", f"strategy={layout}", "trainer=cpu", *micro, *limits))


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a table; 0 if every goal is met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    found: dict[str, list[MeasuredRun]] = {layout: [] for layout in LAYOUTS}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(given.runs):
            for layout, runs in found.items():
                runs.append(measured(layout, Path(folder) / f"{layout}_{number}", given.steps))
    entries, met = [], True
    print(f"{'layout':12} {'step':>9} {'forecast':>9} {'error':>7} {'memory':>11} {'forecast':>11} {'error':>7}")
    for layout, runs in found.items():
        expected = forecast(runs[0].scenario)
        step, memory = median(each.step_seconds for each in runs), median(each.peak_memory_bytes for each in runs)
        errors = expected.step_seconds / step - 1, expected.ledger.total_bytes / memory - 1
        met = met and abs(errors[0]) <= TIME_GOAL and abs(errors[1]) <= MEMORY_GOAL
        print(
            f"{layout:12} {format_seconds(step):>9} {format_seconds(expected.step_seconds):>9} {errors[0]:+7.1%} "
            f"{format_bytes(memory):>11} {format_bytes(expected.ledger.total_bytes):>11} {errors[1]:+7.1%}"
        )
        for what, error, goal in (("step time", errors[0], TIME_GOAL), ("peak memory", errors[1], MEMORY_GOAL)):
            entries.append({"name": f"{layout}: {what}", "value": abs(error), "unit": "fraction", "goal": goal})
    if given.json:
        given.json.write_text(json.dumps(entries, indent=2))
    return 0 if met else 1


if __name__ == "__main__":
    raise SystemExit(main())
