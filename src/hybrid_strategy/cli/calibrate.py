"""`hybrid calibrate RUN...`: refits what is known of a machine to runs that were measured on it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from hybrid_strategy.config.machine import LOCAL, Machine
from hybrid_strategy.config.measured import MeasuredRun, keep, machine_of, measured_run, refitted, under, write_cluster
from hybrid_strategy.planning.calibrate import coefficients
from hybrid_strategy.planning.forecast import forecast
from hybrid_strategy.reporting.console import make_console
from hybrid_strategy.units import format_bytes, format_seconds


def run(arguments: Sequence[str]) -> int:
    """The sub-command."""
    made = argparse.ArgumentParser(
        prog="hybrid calibrate",
        usage="hybrid calibrate RUN... [--output conf/cluster/NAME.yaml]",
        description="Refits the coefficients of a cluster to measured runs.",
    )
    made.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run folder of hybrid train")
    made.add_argument(
        "--output", type=Path, metavar="FILE", help="a file for conf/cluster/; default: what is known of this machine"
    )
    made.add_argument("--json", action="store_true", help="everything as JSON")
    given = made.parse_args(arguments)
    runs = [measured_run(folder) for folder in given.runs]
    before = machine_of(runs)
    after = refitted(before, runs)
    path = given.output
    if path is None and runs[0].config.cluster.name != LOCAL:
        path = Path("conf") / "cluster" / f"{runs[0].config.cluster.name}_measured.yaml"
    if path is None:
        path = keep(after, runs[0])
    else:
        write_cluster(path, after.cluster, runs)
    if given.json:
        print(
            json.dumps(
                {"file": str(path), "coefficients": coefficients(after.cluster), "runs": rows(before, after, runs)}, indent=2
            )
        )
    else:
        show(before, after, runs, make_console())
        make_console().print(f"written to {path}", markup=False, soft_wrap=True)
    return 0


def rows(before: Machine, after: Machine, runs: Sequence[MeasuredRun]) -> list[dict[str, float | str]]:
    """Each run, measured and forecast before and after."""
    found: list[dict[str, float | str]] = []
    for each in runs:
        old, new = forecast(each.scenario), forecast(under(after, each))
        found.append(
            {
                "run": f"{each.config.name} {each.scenario.layout.name}",
                "step_seconds": each.step_seconds,
                "forecast_before": old.step_seconds,
                "forecast": new.step_seconds,
                "peak_memory_bytes": each.peak_memory_bytes,
                "forecast_memory_bytes": new.ledger.total_bytes if each.accelerator == "cpu" else new.ledger.allocated_bytes,
            }
        )
    return found


def show(before: Machine, after: Machine, runs: Sequence[MeasuredRun], console: Console) -> None:
    """Prints the runs and the coefficients."""
    table = Table(box=box.SIMPLE, pad_edge=False)
    for name in ("run", "step", "forecast before", "forecast now", "memory", "forecast now"):
        table.add_column(name, justify="left" if name == "run" else "right")
    for row in rows(before, after, runs):
        step, old, new = (float(row[name]) for name in ("step_seconds", "forecast_before", "forecast"))
        memory, expected = float(row["peak_memory_bytes"]), float(row["forecast_memory_bytes"])
        times = (format_seconds(step), _with_error(format_seconds(old), old, step), _with_error(format_seconds(new), new, step))
        table.add_row(str(row["run"]), *times, format_bytes(memory), _with_error(format_bytes(expected), expected, memory))
    console.print(table)
    old_values, new_values = coefficients(before.cluster), coefficients(after.cluster)
    for name, value in new_values.items():
        console.print(f"  {name:<28} {old_values[name]:.3g} -> {value:.3g}", markup=False)


def _with_error(text: str, forecast_value: float, measured: float) -> str:
    return f"{text} ({forecast_value / measured - 1:+.0%})".replace("%", " %")
