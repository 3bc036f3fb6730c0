"""The live screen of a sweep: where each point stands, what it reached, how long it will take. Plain lines in a log."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from hybrid_strategy.sweeping import states
from hybrid_strategy.sweeping.book import Book
from hybrid_strategy.sweeping.layouts import Skipped
from hybrid_strategy.sweeping.points import Point
from hybrid_strategy.sweeping.ranking import ranked
from hybrid_strategy.sweeping.rows import Row, row_of
from hybrid_strategy.units import format_bytes, format_seconds

_COLOURS = {"ok": "green", "running": "cyan", "failed": "red", "oom": "red", "timeout": "yellow", "preempted": "yellow"}
_REFRESH_SECONDS = 1.0
_ROWS = 40
_NOTE = 48
_COLUMNS = ("point", "state", "step", "loss", "tokens/s", "plan", "peak", "time", "note")
_LESS_IMPORTANT = ("plan", "peak", "time", "tokens/s", "step", "loss")
_LEAST_NOTE = 16
_BETWEEN = 3
"""Characters that a column takes beside its text."""
_SKIPPED_LINES = 8


@dataclass
class Screen:
    """Shows the book as it stands now."""

    book: Book
    console: Console
    _live: Live | None = None
    _shown_at: float = 0.0
    _seen: dict[str, str] = field(default_factory=dict)
    _started: float = field(default_factory=time.monotonic)

    def start(self, missing: Sequence[Point]) -> None:
        """Says what will be done; where there is a terminal, the table stands from now on."""
        for line in opening(self.book, missing):
            self.console.print(line, markup=False, highlight=False, soft_wrap=True)
        self._seen = {point.name: row_of(point).state for point in self.book.points if point not in missing}
        if self.console.is_terminal and missing:
            self._live = Live(console=self.console, auto_refresh=False, transient=True)
            self._live.start()

    def tick(self) -> None:
        """Called as often as one likes; looks at the points once a second."""
        now = time.monotonic()
        if now - self._shown_at < _REFRESH_SECONDS:
            return
        self._shown_at = now
        rows = [row_of(point) for point in self.book.points]
        self._tell(rows)
        if self._live is not None:
            self._live.update(table(rows, self.console.width), refresh=True)

    def stop(self) -> None:
        """The last state stays on the screen."""
        if self._live is not None:
            self._live.stop()
            self._live = None
        rows = [row_of(point) for point in self.book.points]
        self._tell(rows)
        if rows:
            self.console.print(table(rows, self.console.width, live=False))

    def _tell(self, rows: Sequence[Row]) -> None:
        """A line for each point that has changed; on a terminal, which has the table, only what ended badly or waits in vain."""
        for row in rows:
            stuck = row.state == states.PENDING and states.STUCK in row.note
            state = states.STUCK if stuck else row.state
            if self._seen.get(row.name, states.PENDING) == state:
                continue
            self._seen[row.name] = state
            if self._live is None or states.bad(row.state) or stuck:
                console = self._live.console if self._live is not None else self.console
                console.print(line_of(row), markup=False, highlight=False, soft_wrap=True)


def make_screen(book: Book, console: Console) -> Screen:
    """The screen for this console."""
    return Screen(book, console)


def opening(book: Book, missing: Sequence[Point]) -> list[str]:
    """What stands above the table: the size of the sweep, what is held fixed, what is skipped."""
    if book.settings.get("single"):
        return [f"run {', '.join(point.name for point in book.points)}", f"folder: {book.folder}"]
    done = len(book.points) - len(missing)
    words = [f"sweep {book.name}: {_count(len(book.points), 'point')}"]
    if done:
        words.append(f"{done} finished before")
    if book.skipped:
        words.append(f"{sum(each.count for each in book.skipped)} skipped")
    lines = [", ".join(words), f"folder: {book.folder}"]
    fixed, swept = held_fixed([point.facts for point in book.points])
    if len(book.points) > 1:
        lines.append(f"held fixed: {fixed}" + (f"; swept: {swept}" if swept else ""))
    return lines + skipped_lines(book.skipped)


def skipped_lines(skipped: Sequence[Skipped]) -> list[str]:
    """Skipped points, those of one reason together."""
    lines = [f"  skipped {each.name}: {each.reason}" for each in skipped[:_SKIPPED_LINES]]
    rest = skipped[_SKIPPED_LINES:]
    if rest:
        kinds: dict[str, int] = {}
        for each in rest:
            kinds[each.kind] = kinds.get(each.kind, 0) + each.count
        words = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
        lines.append(f"  and {sum(kinds.values())} more: {words}; all in sweep.json")
    return lines


_COMPARED = {
    "tokens_per_step": "{value:,} tokens a step",
    "seed": "seed {value} (order of the data, first values)",
    "max_steps": "{value} steps",
    "num_parameters": "{value:,} parameters",
    "precision": "{value}",
    "learning_rate": "peak rate {value:g}",
}


def held_fixed(facts: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """What makes losses comparable: in words what is the same in all points, and the names of what is not."""
    fixed, swept = [], []
    for key, text in _COMPARED.items():
        values = {each.get(key) for each in facts}
        if len(values) > 1:
            swept.append(key.replace("_", " "))
        elif values and (value := next(iter(values))) is not None and value != -1:
            fixed.append(text.format(value=value))
    return ", ".join(fixed), ", ".join(swept)


def table(rows: Sequence[Row], width: int, live: bool = True) -> Table:
    """The points: those that run and those that ended badly first where there are too many; a live one sums up below.

    Args:
        width: of the screen, in characters; what it has no room for is left out, numbers before names and reasons.
    """
    made = Table(box=box.SIMPLE, pad_edge=False, caption=summary(rows) if live else None, caption_justify="left")
    shown = rows if len(rows) <= _ROWS else sorted(rows, key=lambda row: row.state in (states.OK, states.PENDING))[:_ROWS]
    cells = [dict(zip(_COLUMNS, _cells(row), strict=True)) for row in shown]
    columns = _that_fit(cells, width)
    for name in columns:
        numbers = name not in ("point", "state", "note")
        made.add_column(name, justify="right" if numbers else "left", no_wrap=name != "note", overflow="fold")
    for each in cells:
        made.add_row(*(each[name] for name in columns))
    if len(rows) > len(shown):
        made.add_row("...", f"and {len(rows) - len(shown)} more")
    return made


def _that_fit(cells: Sequence[Mapping[str, str]], width: int) -> list[str]:
    """The columns for a screen: where it is too narrow, without those that are empty, then without the less important ones."""
    widths = {name: max([len(name), *(cell_len(Text.from_markup(each[name]).plain) for each in cells)]) for name in _COLUMNS}
    widths["note"] = min(widths["note"], _LEAST_NOTE)
    empty = [name for name in _COLUMNS if not any(each[name] for each in cells)]
    kept = list(_COLUMNS)
    for name in (*empty, *_LESS_IMPORTANT):
        if sum(widths[each] + _BETWEEN for each in kept) <= width:
            break
        if name in kept:
            kept.remove(name)
    return kept


def _cells(row: Row) -> list[str]:
    colour = _COLOURS.get(row.state)
    state = f"[{colour}]{row.state}[/]" if colour else row.state
    return [
        row.name,
        state,
        f"{row.step}/{row.total_steps}" if row.total_steps else str(row.step or ""),
        f"{row.loss:.4f}" if row.loss is not None else "",
        f"{row.tokens_per_second:,.0f}" if row.tokens_per_second else "",
        f"{row.forecast_difference:+.0%}" if row.forecast_difference is not None else "",
        format_bytes(row.peak_memory_bytes) if row.peak_memory_bytes else "",
        format_seconds(row.seconds) if row.seconds else "",
        _short(row.note).replace("[", "\\["),
    ]


def _short(note: str) -> str:
    """The lines above the table have all of it."""
    return note if len(note) <= _NOTE else note[: _NOTE - 3] + "..."


def line_of(row: Row) -> str:
    """One point in a log."""
    words = [f"{row.name}: {row.state}"]
    if row.state == states.OK:
        words += [f"loss {row.loss:.4f}"] if row.loss is not None else []
        words += [f"{row.tokens_per_second:,.0f} tokens/s"] if row.tokens_per_second else []
    if row.seconds and row.state in states.ENDED:
        words.append(format_seconds(row.seconds))
    return ", ".join(words) + (f": {row.note}" if row.note else "")


def summary(rows: Sequence[Row]) -> str:
    """`3 ok, 1 failed, 2 running, about 4 min left`."""
    counts = {state: sum(row.state == state for row in rows) for state in states.ALL}
    words = [f"{count} {state}" for state, count in counts.items() if count]
    left = seconds_left(rows)
    if left is not None and left >= 1:  # one that takes longer than the others tells nothing
        words.append(f"about {format_seconds(left)} left")
    done = [row for row in rows if row.state == states.OK and row.loss is not None]
    if done and len(rows) > 1:
        words.append(f"best so far {ranked(done, lambda row: row.loss, lambda row: row.tokens_per_second)[0].name}")
    return ", ".join(words)


def seconds_left(rows: Sequence[Row]) -> float | None:
    """By the mean time of those that have ended and the number that run side by side; None before the first has, or where
    none is running."""
    done = [row.seconds for row in rows if row.state in states.ENDED and row.seconds]
    running = [row for row in rows if row.state == states.RUNNING]
    waiting = sum(row.state == states.PENDING for row in rows)
    if not done or not running:  # who waits for others, or for somebody to start it, waits nobody knows how long
        return None
    mean = sum(done) / len(done)
    now = sum(row.seconds_left if row.seconds_left is not None else max(0.0, mean - (row.seconds or 0.0)) for row in running)
    return (now + mean * waiting) / max(1, len(running))


def _count(number: int, one: str) -> str:
    return f"{number} {one}{'' if number == 1 else 's'}"
