"""The planner against published measurements.

    python benchmarks/plan_accuracy.py --rows FILE.csv [FILE.csv ...] [--json FILE] [--attainable]

Columns of the files: see the header of tests/data/published/layouts.csv. Scored, per source and over all:
exact values (rows tagged [analytic]), published FLOP figures counted again, step time and memory of [measured] rows with a full
layout, [OOM] rows that must not fit, and the order of layouts within groups that differ in layout only. With --attainable the
order is scored for forecasts that are the measurements but for a random error, too: it says which error a goal leaves room for.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from plan_rows import Row, read_rows

from hybrid_strategy.planning.flops import training_flops_per_token
from hybrid_strategy.planning.memory import peak_ledger, states_bytes_per_parameter
from hybrid_strategy.planning.numerics import NUMERICS

REPEATABLE = 0.03
"""Two measurements closer than this are not told apart: published figures repeat to 0.05-5 %."""

GROUP_ROWS = 4
"""Groups of fewer rows are not ranked."""

NEAR_BEST = 0.05
"""A choice that costs no more than this over the best measured layout of its group is as good as the best."""


ATTAINABLE_ERRORS = (0.01, 0.02, 0.03, 0.05, 0.08)
"""Deviations of the random errors of `--attainable`."""


def kendall_tau(measured: Sequence[float], forecast: Sequence[float], apart: float = 0.0) -> float:
    """Concordant less discordant pairs over all pairs whose measurements are more than `apart` (relative) from each other.

    >>> kendall_tau([1, 2, 3], [1, 3, 2]), kendall_tau([1, 1.01, 3], [2, 1, 4], apart=0.05)
    (0.3333333333333333, 1.0)
    """
    score = pairs = 0
    for i, first in enumerate(measured):
        for j in range(i):
            low, high = sorted((first, measured[j]))
            if high > low * (1 + apart):
                pairs += 1
                product = (first - measured[j]) * (forecast[i] - forecast[j])
                score += (product > 0) - (product < 0)
    return score / pairs if pairs else 1.0


def summary(errors: Iterable[float]) -> dict[str, float]:
    """Count, median and 90th percentile of |error|, median error and the lowest error, all but the count in percent."""
    signed = sorted(errors)
    size = sorted(map(abs, signed))
    return {
        "n": len(signed),
        "median": 100 * median(size),
        "p90": 100 * size[min(len(size) - 1, int(0.9 * len(size)))],
        "bias": 100 * median(signed),
        "lowest": 100 * signed[0],
    }


def by_source(rows: Iterable[Row], error: Callable[[Row], float | None]) -> dict[str, dict[str, float]]:
    """`summary` of each source and, under `all`, of all rows."""
    errors: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        value = error(row)
        if value is not None:
            errors[row.source].append(value)
    result = {source: summary(values) for source, values in sorted(errors.items())}
    if result:
        result["all"] = summary(value for values in errors.values() for value in values)
    return result


def exact_error(row: Row) -> float | None:
    """An [analytic] memory row against the ledger, or against the states alone where the row has no model."""
    stated = row.number("peak_mem_gb")
    if row.tag != "analytic" or stated is None:
        return None
    if row.scenario is not None:
        return row.forecast_memory_bytes / 1e9 / stated - 1
    stage = {"0": "ddp", "1": "zero1", "2": "zero2", "3": "zero3"}[row.values["fsdp_or_zero_stage"]]
    each = states_bytes_per_parameter(NUMERICS["mixed"], stage, int(row.values["dp"]))
    return round(each * float(row.values["params_b"]), decimals(row.values["peak_mem_gb"])) / stated - 1


def decimals(text: str) -> int:
    """Digits after the point: a stated 1.9 is compared at one digit."""
    return len(text.partition(".")[2])


def flops_error(row: Row) -> float | None:
    """Our count at the row's own throughput against the FLOP/s (or MFU) it states."""
    rate, stated = row.number("tokens_per_s_per_gpu"), row.measured_flops
    if rate is None and row.number("step_time_s") is not None and row.scenario is not None:
        rate = row.scenario.step_tokens / (float(row.values["step_time_s"]) * row.scenario.layout.world_size)
    if row.tag != "measured" or row.missing or row.scenario is None or rate is None or not stated:
        return None
    return training_flops_per_token(row.scenario.shape, row.convention) * rate / stated - 1


def time_error(row: Row) -> float | None:
    if row.tag != "measured" or row.missing or row.scenario is None or not row.measured_seconds:
        return None
    return row.forecast_seconds / row.measured_seconds - 1


def memory_error(row: Row) -> float | None:
    stated = row.number("peak_mem_gb")
    if row.tag != "measured" or row.missing or row.scenario is None or stated is None or not row.memory_is_modelled:
        return None
    return row.forecast_memory_bytes / 1e9 / stated - 1


def out_of_memory(rows: Iterable[Row]) -> dict[str, int]:
    """[OOM] rows, and how many of them are forecast not to fit."""
    tried = [row.scenario for row in rows if row.tag == "OOM" and row.scenario is not None]
    return {"n": len(tried), "refused": sum(not peak_ledger(scenario).fits for scenario in tried)}


def ranking(rows: Iterable[Row], forecast_of: Callable[[Row], float] | None = None) -> dict[str, dict[str, float]]:
    """Per source: order of layouts within groups, and what the layout that the forecast (or `forecast_of`) chooses costs."""
    groups: dict[tuple[str, ...], list[Row]] = defaultdict(list)
    for row in rows:
        if time_error(row) is not None:
            groups[row.group_key].append(row)
    found: dict[str, list[tuple[float, float, float]]] = defaultdict(list)
    for key, members in groups.items():
        if len({row.layout_key for row in members}) >= GROUP_ROWS:
            pairs = [(row.measured_seconds or 0.0, forecast_of(row) if forecast_of else row.forecast_seconds) for row in members]
            measured, forecast = zip(*pairs, strict=True)
            loss = min(pairs, key=lambda pair: pair[1])[0] / min(measured) - 1
            taus = kendall_tau(measured, forecast), kendall_tau(measured, forecast, REPEATABLE)
            found[key[0]].append((*taus, loss))
    return {source: _ranked(values) for source, values in sorted(found.items())}


def _ranked(values: list[tuple[float, float, float]]) -> dict[str, float]:
    plain, apart, losses = zip(*values, strict=True)
    return {
        "groups": len(values),
        "tau": sum(plain) / len(plain),
        "tau_apart": sum(apart) / len(apart),
        "within_5_percent": sum(loss <= NEAR_BEST for loss in losses),
        "median_loss": 100 * median(losses),
        "worst_loss": 100 * max(losses),
    }


def attainable(rows: Sequence[Row], error: float, draws: int = 10) -> dict[str, dict[str, float]]:
    """`ranking`, mean of several draws, of forecasts that are the measurements times e^x, x normal of deviation `error`."""
    dice = random.Random(0)
    found = [ranking(rows, lambda row: (row.measured_seconds or 0.0) * dice.lognormvariate(0, error)) for _ in range(draws)]
    return {source: {key: sum(each[source][key] for each in found) / draws for key in one} for source, one in found[0].items()}


def score(rows: list[Row]) -> dict[str, Any]:
    """Everything that is printed."""
    skipped: Counter[str] = Counter()
    for row in rows:
        for reason in row.missing:
            skipped[reason] += row.tag == "measured"
    return {
        "rows": len(rows),
        "skipped": {reason: count for reason, count in skipped.items() if count},
        "exact": by_source(rows, exact_error),
        "flops": by_source(rows, flops_error),
        "step_time": by_source(rows, time_error),
        "memory": by_source(rows, memory_error),
        "out_of_memory": out_of_memory(rows),
        "ranking": ranking(rows),
    }


def goals(result: dict[str, Any]) -> list[tuple[str, bool]]:
    """What the planner promises, and whether it holds on these rows."""
    times, memory, ranks = result["step_time"], result["memory"], result["ranking"]
    wanted: list[tuple[str, bool]] = []
    if result["exact"]:
        wanted.append(("exact: every analytic row within 0.5 %", max(_size(each) for each in result["exact"].values()) <= 0.5))
    if times:
        wanted += [
            ("step time: median <= 10 % in every source", all(each["median"] <= 10 for each in times.values())),
            ("step time: median <= 8 % over all", times["all"]["median"] <= 8),
            ("step time: 90th percentile <= 25 % over all", times["all"]["p90"] <= 25),
        ]
    if memory:
        wanted += [
            ("memory: median <= 10 % over all", memory["all"]["median"] <= 10),
            ("memory: never more than 15 % low", memory["all"]["lowest"] >= -15),
        ]
    if result["out_of_memory"]["n"]:
        wanted.append(("OOM: all refused", result["out_of_memory"]["refused"] == result["out_of_memory"]["n"]))
    for source, each in ranks.items():
        near = f"ranking {source}: layout chosen within {NEAR_BEST:.0%} of the best measured one in every group"
        wanted += [(f"ranking {source}: tau >= 0.8", each["tau"] >= 0.8), (near, each["within_5_percent"] == each["groups"])]
    return wanted


def _size(each: dict[str, float]) -> float:
    return max(abs(each["lowest"]), each["p90"])


def show(result: dict[str, Any]) -> None:
    """The tables."""
    for name in ("exact", "flops", "step_time", "memory"):
        print(
            f"\n{name.replace('_', ' ')}: error in %\n{'source':20} {'n':>5} {'median':>7} {'p90':>7} {'bias':>7} {'lowest':>7}"
        )
        for source, each in result[name].items():
            values = " ".join(f"{each[key]:7.2f}" for key in ("median", "p90", "bias", "lowest"))
            print(f"{source:20} {each['n']:5d} {values}")
    oom = result["out_of_memory"]
    print(f"\nout of memory: {oom['refused']} of {oom['n']} rows forecast not to fit")
    head = f"tau of pairs > {REPEATABLE:.0%} apart   chosen within {NEAR_BEST:.0%}   median, worst loss %"
    print(f"\nranking\n{'source':20} groups  tau   {head}")
    for source, each in result["ranking"].items():
        inside = f"{each['within_5_percent']} of {each['groups']}"
        taus = f"{each['tau']:5.2f} {each['tau_apart']:16.2f}"
        losses = f"{each['median_loss']:13.1f} {each['worst_loss']:8.1f}"
        print(f"{source:20} {each['groups']:6d} {taus} {inside:>22} {losses}")
    print("\ngoals")
    for text, met in goals(result):
        print(f"  {'met   ' if met else 'MISSED'} {text}")
    print(f"\n{result['rows']} rows; not scored: {result['skipped'] or 'none'}")


def show_attainable(rows: Sequence[Row]) -> None:
    """The figures of the ranking by the error of the forecast."""
    print(f"\nforecasts with a random error\n{'source':20} deviation   median |error|   tau   chosen within {NEAR_BEST:.0%}")
    for error in ATTAINABLE_ERRORS:
        for source, each in attainable(rows, error).items():
            inside = f"{each['within_5_percent']:.1f} of {each['groups']:.0f}"
            print(f"{source:20} {error:9.0%} {0.6745 * error:16.1%} {each['tau']:5.2f} {inside:>18}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Reads, scores, prints; 0 if the files could be read."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", type=Path, required=True)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--attainable", action="store_true")
    given = parser.parse_args(arguments)
    rows = [row for path in given.rows for row in read_rows(path)]
    result = score(rows)
    show(result)
    if given.attainable:
        show_attainable(rows)
    if given.json:
        given.json.write_text(json.dumps({**result, "goals": dict(goals(result))}, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
