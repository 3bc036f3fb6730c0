"""The page of a sweep: what was swept, what won, how fast and how well each point did, what failed and why."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from hybrid_strategy.files import read_json, write_text
from hybrid_strategy.sweeping.book import Book
from hybrid_strategy.sweeping.points import command_of
from hybrid_strategy.sweeping.ranking import ranked
from hybrid_strategy.sweeping.report.figures import figures
from hybrid_strategy.sweeping.report.tables import Entry, points_table, reasons
from hybrid_strategy.sweeping.rows import RESULT_FILE, row_of
from hybrid_strategy.sweeping.screen import held_fixed, summary

REPORT_FILE = "report.html"
_STYLE = Path(__file__).with_name("page.css")


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
        _winner(best, str(book.settings.get("command", ""))),
        points_table(best, rest),
        *figures([each.point for each in best], {each.point.name: each.row for each in entries}, book),
        reasons(book, rest),
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
    everywhere = {key for key in values if all(key in {name.lstrip("+") for name in each.point.swept} for each in entries)}
    swept = [
        f"{escape(key)} = {escape(_joined(each))}{'' if key in everywhere else ', or not given'}"
        for key, each in values.items()
        if len(each) > 1 or key not in everywhere
    ]
    lines = [f"<p><b>Swept:</b> {'; '.join(swept) or 'nothing'}</p>", f"<p><b>Held fixed:</b> {escape(fixed) or 'nothing'}</p>"]
    if also:
        lines.append(f'<p class="soft">Not the same in all points: {escape(also)}.</p>')
    command = str(book.settings.get("command", ""))
    lines += [f'<pre class="soft">{escape(command)}</pre>'] if command else []
    return f"<h2>What was compared</h2>{''.join(lines)}"


def _joined(values: Sequence[str], most: int = 12) -> str:
    return ", ".join(values[:most]) + (f", and {len(values) - most} more" if len(values) > most else "")


def _winner(best: Sequence[Entry], command: str) -> str:
    if not best:
        return "<h2>Best</h2><p>No point ended well.</p>"
    first = best[0]
    loss = f"loss {first.row.loss:.4f}" if first.row.loss is not None else ""
    speed = f"{first.row.tokens_per_second:,.0f} tokens/s" if first.row.tokens_per_second else ""
    why = "Least loss; among losses that are equal within 0.1 %, the fastest."
    return (
        f'<h2>Best: {escape(first.point.name)}</h2><div class="panel"><p>{escape(", ".join(filter(None, (loss, speed))))}</p>'
        f"<pre>{escape(command_of(first.point, command))}</pre></div><p class='soft'>{why}</p>"
    )
