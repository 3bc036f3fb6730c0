"""`results.csv`, `results.json` and `report.html` of a sweep: every point with what it is, how it ended, what it reached."""

from __future__ import annotations

import csv
import io
from typing import Any

from hybrid_strategy.files import as_number, read_json, write_json, write_text
from hybrid_strategy.sweeping import states
from hybrid_strategy.sweeping.book import Book, state_of
from hybrid_strategy.sweeping.points import Point
from hybrid_strategy.sweeping.ranking import ranked
from hybrid_strategy.sweeping.report.page import write_report
from hybrid_strategy.sweeping.rows import RESULT_FILE, row_of

CSV_FILE, JSON_FILE = "results.csv", "results.json"

_REACHED = ("steps", "seconds", "first_validation_loss", "last_validation_loss", "best_validation_loss", "tokens_per_second")


def write_results(book: Book) -> list[dict[str, Any]]:
    """Writes the three files; returns the rows of the first two, best first, skipped points last."""
    rows = result_rows(book)
    write_json(book.folder / JSON_FILE, {"name": book.name, **book.settings, "results": rows})
    write_text(book.folder / CSV_FILE, _csv(rows))
    write_report(book)
    return rows


def result_rows(book: Book) -> list[dict[str, Any]]:
    """One mapping a point; the same keys in all of them."""
    rows = [_row(point) for point in book.points]
    done = [row for row in rows if row["state"] == states.OK]
    rest = [row for row in rows if row["state"] != states.OK]
    rows = [*ranked(done, lambda row: row["loss"], lambda row: row["tokens_per_second"]), *rest]
    for each in book.skipped:
        values = {"point": each.name, "state": states.SKIPPED, "reason": each.reason, "kind": each.kind, "count": each.count}
        rows.append({**values, **{str(key).rpartition(".")[2]: value for key, value in each.values.items()}})
    names = list(dict.fromkeys(name for row in rows for name in row))
    return [{name: row.get(name) for name in names} for row in rows]


def _row(point: Point) -> dict[str, Any]:
    state, shown = state_of(point), row_of(point)
    result = read_json(point.folder / RESULT_FILE) or {}
    values: dict[str, Any] = {"point": point.name, "state": shown.state, "reason": shown.note}
    values |= {key.lstrip("+"): value for key, value in point.swept.items()}
    values |= {"loss": shown.loss, **{name: _plain(result.get(name)) for name in _REACHED}}
    values |= {"peak_memory_bytes": shown.peak_memory_bytes, "forecast_difference": shown.forecast_difference}
    values |= {name: value for name, value in point.facts.items() if name not in values}
    further = {"attempts": state.attempt, "requeues": state.requeues, "job": state.job, "folder": str(point.folder)}
    return values | {"wall_seconds": result.get("wall_seconds"), **further}


def _plain(value: Any) -> Any:
    """Numbers that are not finite stand in files as text."""
    return as_number(value) if isinstance(value, str) else value


def _csv(rows: list[dict[str, Any]]) -> str:
    out = io.StringIO()
    writer = csv.DictWriter(out, list(rows[0]) if rows else ["point"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()
