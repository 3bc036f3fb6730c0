"""The last lines of a sweep: where its results are, what won, what to type next."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from hybrid_strategy.sweeping import states
from hybrid_strategy.sweeping.book import Book
from hybrid_strategy.sweeping.points import Point, command_of
from hybrid_strategy.sweeping.ranking import ranked
from hybrid_strategy.sweeping.report.page import REPORT_FILE
from hybrid_strategy.sweeping.results import CSV_FILE
from hybrid_strategy.sweeping.rows import Row
from hybrid_strategy.sweeping.screen import summary


def closing_lines(book: Book, rows: Sequence[Row], detached: bool) -> list[str]:
    """What stands below the table; each command is ready to paste."""
    folder = shlex.quote(str(book.folder))
    if detached:
        verbs = ("status", "logs", "cancel", "resume", "report")
        return [f"submitted; it goes on without this command. {verb_lines(verbs, folder)}"]
    lines = [summary(rows)]
    skipped = sum(each.count for each in book.skipped)
    if skipped:
        lines[0] += f", {skipped} skipped"
    best = winner(book, rows)
    if best is not None and len(rows) > 1:
        lines.append(f"best: {best.name}: {command_of(best, str(book.settings.get('command', '')))}")
    lines.append(f"results: {book.folder / CSV_FILE}")
    report = book.folder / REPORT_FILE
    lines += [f"report: {report}"] if report.exists() else []
    lines += sync_lines(book.points, book.folder)
    if any(states.bad(row.state) for row in rows):
        lines.append(goes_on(book.folder))
    return lines


def goes_on(folder: Path | None) -> str:
    """How to run what is missing."""
    return f"the same command again, or `hybrid sweep resume {shlex.quote(str(folder))}`, runs only what is missing"


def verb_lines(verbs: Sequence[str], folder: str) -> str:
    """`hybrid sweep status|logs|... FOLDER`"""
    return f"hybrid sweep {'|'.join(verbs)} {folder}"


def winner(book: Book, rows: Sequence[Row]) -> Point | None:
    """The best point; None where none has ended well."""
    done = [(row, point) for row, point in zip(rows, book.points, strict=True) if row.state == states.OK]
    best = ranked(done, lambda each: each[0].loss, lambda each: each[0].tokens_per_second)
    return best[0][1] if best else None


def sync_lines(points: Sequence[Point], folder: Path) -> list[str]:
    """One line that uploads every offline W&B run of the sweep."""
    below, own = [path for point in points if point.folder != folder for path in _offline(point.folder)], _offline(folder)
    if not below and not own:
        return []
    if len(below) + len(own) == 1:
        return [f"W&B: offline; upload with: wandb sync {shlex.quote(str((*below, *own)[0]))}"]
    start = shlex.quote(str(folder))
    homes = list(dict.fromkeys(path.parents[1] for path in below))
    if below and {path.parents[2] for path in folder.glob("*/wandb/offline-run-*/*.wandb")} == set(homes):
        homes = [folder / "*"]  # none that was set aside is among them
    places = [f"{start}/{'*' if home.name == '*' else shlex.quote(home.name)}/wandb/offline-run-*" for home in homes]
    places += [f"{start}/wandb/offline-run-*"] if own else []
    return [f"W&B: {len(below) + len(own)} offline runs; upload with: wandb sync --append {' '.join(places)}"]


def _offline(folder: Path) -> list[Path]:
    return sorted({path.parent for path in (folder / "wandb").glob("offline-run-*/*.wandb")})
