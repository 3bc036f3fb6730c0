"""The page of a sweep: what was swept, what won, how fast and how well each point did, what failed and why."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from hybrid_strategy.files import read_json, write_text
from hybrid_strategy.sweeping import states
from hybrid_strategy.sweeping.book import Book
from hybrid_strategy.sweeping.points import Point, command_of
from hybrid_strategy.sweeping.ranking import ranked
from hybrid_strategy.sweeping.report.figures import figures
from hybrid_strategy.sweeping.rows import RESULT_FILE, Row, row_of
from hybrid_strategy.sweeping.screen import held_fixed, summary
from hybrid_strategy.units import format_bytes, format_seconds

REPORT_FILE = "report.html"
_STYLE = Path(__file__).with_name("page.css")

_ROWS, _REASONS, _TRACEBACKS, _TRACEBACK = 200, 150, 12, 3000
"""What is shown at most, so that the file stays small; `results.csv` has all of it. The last one is in characters."""


@dataclass(frozen=True)
class Entry:
    """A point with what came of it."""

    point: Point
    row: Row
    result: Mapping[str, Any]

    @property
    def ok(self) -> bool:
        return self.row.state == states.OK


def write_report(book: Book) -> None:
    """Writes `report.html` into the sweep's folder."""
    write_text(book.folder / REPORT_FILE, report(book))


def report(book: Book) -> str:
    """The whole page, with nothing outside of it."""
    entries = [Entry(point, row_of(point), read_json(point.folder / RESULT_FILE) or {}) for point in book.points]
    best = ranked([each for each in entries if each.ok], lambda each: each.row.loss, lambda each: each.row.tokens_per_second)
    rest = [each for each in entries if not each.ok]
    title = escape(f"Sweep {book.name}")
    body = [
        f"<h1>{title}</h1>",
        f'<p class="soft">{escape(summary([each.row for each in entries]))}{_skipped_count(book)}</p>',
        _what(book, entries),
        _winner(best),
        _table(best, rest),
        *figures([each.point for each in best], {each.point.name: each.row for each in entries}, book),
        _reasons(book, rest),
    ]
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1"><title>{title}</title>'
    icon = '<link rel="icon" href="data:,">'  # else browsers ask for one, and note that there is none
    style = f"<style>{_STYLE.read_text(encoding='utf-8')}</style>"
    return f'<!doctype html><html lang="en"><head>{head}{icon}{style}</head><body>{"".join(body)}</body></html>\n'


def _skipped_count(book: Book) -> str:
    count = sum(each.count for each in book.skipped)
    return f", {count} skipped" if count else ""


def _what(book: Book, entries: Sequence[Entry]) -> str:
    """What was swept with its values, and what was the same in all points."""
    fixed, also = held_fixed([each.point.facts for each in entries])
    values: dict[str, list[str]] = {}
    for each in entries:
        for key, value in each.point.swept.items():
            found = values.setdefault(key.lstrip("+"), [])
            if value not in found:
                found.append(value)
    swept = [f"{escape(key)} = {escape(_joined(each))}" for key, each in values.items() if len(each) > 1]
    lines = [f"<p><b>Swept:</b> {'; '.join(swept) or 'nothing'}</p>", f"<p><b>Held fixed:</b> {escape(fixed) or 'nothing'}</p>"]
    if also:
        lines.append(f'<p class="soft">Not the same in all points: {escape(also)}.</p>')
    lines.append(f'<p class="soft">{escape(str(book.settings.get("command", "")))}</p>')
    return f"<h2>What was compared</h2>{''.join(lines)}"


def _joined(values: Sequence[str], most: int = 12) -> str:
    return ", ".join(values[:most]) + (f", and {len(values) - most} more" if len(values) > most else "")


def _winner(best: Sequence[Entry]) -> str:
    if not best:
        return "<h2>Best</h2><p>No point ended well.</p>"
    first = best[0]
    loss = f"loss {first.row.loss:.4f}" if first.row.loss is not None else ""
    speed = f"{first.row.tokens_per_second:,.0f} tokens/s" if first.row.tokens_per_second else ""
    why = "Least loss; among losses that are equal within 0.1 %, the fastest."
    return (
        f'<h2>Best: {escape(first.point.name)}</h2><div class="panel"><p>{escape(", ".join(filter(None, (loss, speed))))}</p>'
        f"<pre>{escape(command_of(first.point))}</pre></div><p class='soft'>{why}</p>"
    )


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
_TEXT_COLUMNS = (1, 2)


def _table(best: Sequence[Entry], rest: Sequence[Entry]) -> str:
    heads = "".join(
        f"<th{' class=text' if index in _TEXT_COLUMNS else ''}>{escape(name)}</th>" for index, name in enumerate(_HEADS)
    )
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
    name = f'<td class="text">{escape(entry.point.name)}</td>'
    return f"<td>{number}</td>{name}{word}<td>{entry.point.resources.world_size}</td>" + "".join(
        f"<td>{each}</td>" for each in cells
    )


def _off(measured: float | None, expected: float | None) -> str:
    """How far the measured value is from the forecast."""
    return f" <small>{measured / expected - 1:+.0%}</small>" if measured and expected else ""


def _reasons(book: Book, rest: Sequence[Entry]) -> str:
    bad = [each for each in rest if states.bad(each.row.state)]
    rows = [(each.point.name, each.row.state, each.row.note) for each in bad]
    rows += [
        (each.name, f"skipped: {each.kind}" + (f" ({each.count})" if each.count > 1 else ""), each.reason)
        for each in book.skipped
    ]
    if not rows:
        return ""
    lines = [
        f'<tr><td class="text">{escape(name)}</td><td class="text">{escape(word)}</td>'
        f'<td class="reason">{escape(why[:400])}</td></tr>'
        for name, word, why in rows[:_REASONS]
    ]
    heads = '<th class="text">point</th><th class="text">state</th><th class="text">reason</th>'
    table = f'<div class="scroll"><table><thead><tr>{heads}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'
    more = f'<p class="soft">{len(rows) - _REASONS} more are in results.csv.</p>' if len(rows) > _REASONS else ""
    return f"<h2>Failed and skipped</h2>{table}{more}{''.join(_tracebacks(bad))}"


def _tracebacks(bad: Iterable[Entry]) -> list[str]:
    having = [each for each in bad if each.result.get("traceback")][:_TRACEBACKS]
    return [
        f"<details><summary>{escape(each.point.name)}: rank {each.result.get('rank')}</summary>"
        f"<pre>{escape(str(each.result['traceback'])[-_TRACEBACK:])}</pre></details>"
        for each in having
    ]
