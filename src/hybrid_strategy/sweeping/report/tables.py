"""The tables of the report: every point with what was measured and forecast, and why points failed or were skipped."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from hybrid_strategy.sweeping import states
from hybrid_strategy.sweeping.book import Book
from hybrid_strategy.sweeping.points import Point
from hybrid_strategy.sweeping.rows import Row
from hybrid_strategy.units import format_bytes, format_seconds

_ROWS, _REASONS, _REASON, _TRACEBACKS, _TRACEBACK = 200, 150, 400, 12, 3000
"""What is shown at most, so that the file stays small; `results.csv` has all of it. `_REASON` and `_TRACEBACK`: characters."""


@dataclass(frozen=True)
class Entry:
    """A point with what came of it."""

    point: Point
    row: Row
    result: Mapping[str, Any]

    @property
    def ok(self) -> bool:
        return self.row.state == states.OK


_HEADS = (
    "#",
    "point",
    "state",
    "ranks",
    "loss",
    "tokens/s",
    "forecast",
    "step",
    "forecast",
    "memory",
    "forecast",
    "bubble",
    "time",
)
_KINDS = {1: " class=name", 2: " class=text"}
"""Of columns that are not numbers."""


def points_table(best: Sequence[Entry], rest: Sequence[Entry]) -> str:
    """Those that ended well, best first, then the others."""
    heads = "".join(f"<th{_KINDS.get(index, '')}>{escape(name)}</th>" for index, name in enumerate(_HEADS))
    rows = [_cells(str(number), each) for number, each in enumerate(best, 1)] + [_cells("", each) for each in rest]
    lines = [f"<tr{' class=winner' if index == 0 and best else ''}>{row}</tr>" for index, row in enumerate(rows[:_ROWS])]
    more = f'<p class="soft">{len(rows) - _ROWS} more points are in results.csv.</p>' if len(rows) > _ROWS else ""
    doubts = {str(each.point.facts.get("forecast_doubt") or "") for each in (*best, *rest)} - {""}
    doubt = f'<p class="soft">{escape("; ".join(sorted(doubts)).capitalize())}.</p>' if doubts else ""
    table = f'<div class="scroll"><table><thead><tr>{heads}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'
    return f"<h2>All points, best first</h2>{table}{more}{doubt}"


def _cells(number: str, entry: Entry) -> str:
    row, facts = entry.row, entry.point.facts
    measured: Mapping[str, Any] = entry.result.get("measured") or {}
    word = f'<td class="text {"ok" if entry.ok else "bad" if states.bad(row.state) else ""}">{escape(row.state)}</td>'
    speed, step, memory = (
        facts.get("forecast_tokens_per_second"),
        facts.get("forecast_step_seconds"),
        facts.get("forecast_memory_bytes"),
    )
    cells = [
        f"{row.loss:.4f}" if row.loss is not None else "",
        f"{row.tokens_per_second:,.0f}" if row.tokens_per_second else "",
        f"{speed:,.0f}{_off(row.tokens_per_second, speed)}" if speed else "",
        format_seconds(measured["step_seconds"]) if "step_seconds" in measured else "",
        f"{format_seconds(step)}{_off(measured.get('step_seconds'), step)}" if step else "",
        format_bytes(row.peak_memory_bytes) if row.peak_memory_bytes else "",
        f"{format_bytes(memory)}{_off(row.peak_memory_bytes, memory)}" if memory else "",
        f"{measured['bubble_fraction']:.1%}" if "bubble_fraction" in measured else "",
        format_seconds(row.seconds) if row.seconds else "",
    ]
    name = f'<td class="name">{_breakable(entry.point.name)}</td>'
    return f"<td>{number}</td>{name}{word}<td>{entry.point.resources.world_size}</td>" + "".join(
        f"<td>{each}</td>" for each in cells
    )


def _breakable(name: str) -> str:
    """A name that may go on in the next line after its marks."""
    return escape(name).replace("_", "_<wbr>")


def _off(measured: float | None, expected: float | None) -> str:
    """How far the measured value is from the forecast."""
    return f" <small>{measured / expected - 1:+.0%}</small>" if measured and expected else ""


def reasons(book: Book, rest: Sequence[Entry]) -> str:
    """What did not end well and what was not run, with the tracebacks of the first ones; empty where there is nothing."""
    bad = [each for each in rest if states.bad(each.row.state)]
    rows = [(each.point.name, each.row.state, each.row.note) for each in bad]
    rows += [
        (each.name, f"skipped: {each.kind}" + (f" ({each.count})" if each.count > 1 else ""), each.reason)
        for each in book.skipped
    ]
    if not rows:
        return ""
    lines = [
        f'<tr><td class="name">{_breakable(name)}</td><td class="text">{escape(word)}</td>'
        f'<td class="reason">{escape(why[:_REASON])}{"…" if len(why) > _REASON else ""}</td></tr>'
        for name, word, why in rows[:_REASONS]
    ]
    heads = '<th class="name">point</th><th class="text">state</th><th class="text">reason</th>'
    head = f'<table class="reasons"><thead><tr>{heads}</tr></thead>'
    table = f'<div class="scroll">{head}<tbody>{"".join(lines)}</tbody></table></div>'
    more = f'<p class="soft">{len(rows) - _REASONS} more are in results.csv.</p>' if len(rows) > _REASONS else ""
    return f"<h2>Failed and skipped</h2>{table}{more}{''.join(_tracebacks(bad))}"


def _tracebacks(bad: Iterable[Entry]) -> list[str]:
    having = [each for each in bad if each.result.get("traceback")][:_TRACEBACKS]
    return [
        f"<details><summary>{escape(each.point.name)}{_rank(each.result.get('rank'))}</summary>"
        f"<pre>{escape(str(each.result['traceback'])[-_TRACEBACK:])}</pre></details>"
        for each in having
    ]


def _rank(rank: Any) -> str:
    return "" if rank is None else f": rank {rank}"
