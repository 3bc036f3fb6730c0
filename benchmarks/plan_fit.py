"""Fits the planner's coefficients to published rows, and says what they are worth on rows they have not seen.

    python benchmarks/plan_fit.py --rows FILE.csv [FILE.csv ...] [--leave-one-out | --half]

One set of kernel and link coefficients for each kind of GPU (both A100 are one kind), one efficiency for each software stack;
`eager` is 1 by definition. Nothing is fitted to a source, a model or a row. Prints the values to put into conf/cluster/*.yaml and
planning/stacks.py. With --leave-one-out every source is forecast by a fit to all the others that starts from values which are the
same for every GPU, so that nothing of the source is known. With --half the fit sees one half of the groups of rows that differ in
layout only (by a hash of what they have in common), and both halves are scored.
"""

from __future__ import annotations

import argparse
import sys
import zlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from math import log, sqrt
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from plan_accuracy import summary
from plan_rows import Row, read_rows

from hybrid_strategy.planning.calibrate import COEFFICIENTS, Values, coefficients, descend, fit_loss, with_coefficients
from hybrid_strategy.planning.stacks import STACKS
from hybrid_strategy.planning.step_time import StepModel

SHARED = ("kernels.memory_efficiency", "kernels.launch_seconds")
"""Coefficients that are the same for every kind of GPU: streaming reaches the same share, and launching is the processor's."""

NEUTRAL = {
    "kernels.matmul_efficiency": 0.75,
    "kernels.fp8_efficiency": 0.6,
    "kernels.attention_efficiency": 0.4,
    "kernels.memory_efficiency": 0.85,
    "kernels.launch_seconds": 1e-5,
    "intra_node.efficiency": 0.8,
    "inter_node.efficiency": 0.85,
    "intra_node.latency_seconds": 5e-6,
}
"""Where a fit starts that may know nothing: rules of thumb (80 % of the wire, three quarters of the peak)."""

PULL = 0.15
MOST_ROWS = 150


def kind_of(row: Row) -> str:
    """The kind of GPU of a row."""
    assert row.scenario is not None
    name = row.scenario.cluster.name
    return "a100" if name.startswith("a100") else "h100_sxm" if name == "h200" else name


def usable(rows: Sequence[Row]) -> list[Row]:
    """Measured rows with a full layout; of a large source every so many, so that none outweighs the others."""
    found: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        if row.tag == "measured" and row.scenario is not None and not row.missing and row.measured_seconds:
            found[row.source].append(row)
    return [row for members in found.values() for row in members[:: max(1, len(members) // MOST_ROWS)]]


def start_of(rows: Sequence[Row], neutral: bool) -> Values:
    """The present coefficients of all kinds of GPU and stacks in `rows`, or `NEUTRAL` ones."""
    values: Values = {}
    for row in rows:
        assert row.scenario is not None
        for key, value in coefficients(row.scenario.cluster).items():
            values.setdefault(key if key in SHARED else f"{kind_of(row)}:{key}", NEUTRAL[key] if neutral else value)
        name = row.scenario.stack.name
        if name != "eager":
            values.setdefault(f"stack:{name}", 1.0 if neutral else STACKS[name].efficiency)
    return values


def forecast_seconds(row: Row, values: Values) -> float:
    """The forecast of a row under other coefficients."""
    assert row.scenario is not None
    cluster, stack, kind = row.scenario.cluster, row.scenario.stack, kind_of(row)
    mine = {}
    for key in coefficients(cluster):
        mine[key] = values.get(key, values.get(f"{kind}:{key}", 0.0)) or coefficients(cluster)[key]
    changed = replace(stack, efficiency=values.get(f"stack:{stack.name}", stack.efficiency))
    tried = replace(row.scenario, cluster=with_coefficients(cluster, mine), stack=changed)
    return StepModel(tried).step_time(play=False).step_seconds


def fit(rows: Sequence[Row], start: Values, rounds: int = 5) -> Values:
    """The coefficients for which the sources' mean errors, each weighted by the root of its rows, are least."""
    bounds = {key: COEFFICIENTS.get(key.partition(":")[2] or key, (0.3, 2.0)) for key in start}

    def loss(values: Values) -> float:
        errors: dict[str, list[float]] = defaultdict(list)
        for row in rows:
            errors[row.source].append(log(forecast_seconds(row, values) / (row.measured_seconds or 1.0)))
        weight = sum(sqrt(len(members)) for members in errors.values())
        means = sum(sqrt(len(members)) * fit_loss(members, {}, {}, 0.0) for members in errors.values())
        return means / weight + fit_loss((), values, start, PULL / len(values))

    return descend(loss, start, bounds, rounds)


def leave_one_out(rows: Sequence[Row]) -> None:
    """Each source by the others."""
    start = start_of(rows, neutral=True)
    print(f"{'left out':20} {'n':>5} {'median':>7} {'p90':>7} {'bias':>7}   error in % by a fit to the other sources")
    every = []
    for source in sorted({row.source for row in rows}):
        values = fit([row for row in rows if row.source != source], start, rounds=4)
        errors = [forecast_seconds(row, values) / (row.measured_seconds or 1.0) - 1 for row in rows if row.source == source]
        every += errors
        one = summary(errors)
        print(f"{source:20} {one['n']:5.0f} {one['median']:7.2f} {one['p90']:7.2f} {one['bias']:7.2f}", flush=True)
    one = summary(every)
    print(f"{'all':20} {one['n']:5.0f} {one['median']:7.2f} {one['p90']:7.2f} {one['bias']:7.2f}")


def half_of(row: Row) -> int:
    """0 or 1: the same for all rows that differ in layout only."""
    return zlib.crc32(repr(row.group_key).encode()) % 2


def show_halves(rows: Sequence[Row], values: Values) -> None:
    """The errors on the half that was fitted to, and on the other."""
    head = f"{'n':>5} {'median':>7} {'p90':>7} {'bias':>7}"
    print(f"error in % on the half that was fitted to, and on the other\n{'source':20} {head}   {head}")
    sources = sorted({row.source for row in rows})
    for name in (*sources, "all"):
        columns = []
        for half in (0, 1):
            chosen = [row for row in rows if half_of(row) == half and name in (row.source, "all")]
            one = summary(forecast_seconds(row, values) / (row.measured_seconds or 1.0) - 1 for row in chosen) if chosen else None
            columns.append(
                f"{one['n']:5.0f} {one['median']:7.2f} {one['p90']:7.2f} {one['bias']:7.2f}" if one else f"{0:5d}" + " " * 24
            )
        print(f"{name:20} {columns[0]}   {columns[1]}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Fits and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", type=Path, required=True)
    parser.add_argument("--leave-one-out", action="store_true")
    parser.add_argument("--half", action="store_true")
    given = parser.parse_args(arguments)
    rows = usable([row for path in given.rows for row in read_rows(path)])
    if given.leave_one_out:
        leave_one_out(rows)
        return 0
    start = start_of(rows, neutral=False)
    values = fit([row for row in rows if half_of(row) == 0] if given.half else rows, start)
    for key, value in sorted(values.items()):
        print(f"{key:45} {start[key]:12.4g} -> {value:12.4g}")
    if given.half:
        show_halves(rows, values)
    return 0


if __name__ == "__main__":
    sys.exit(main())
