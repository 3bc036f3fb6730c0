"""`metrics.csv` of a point, whole across attempts: Lightning's logger starts an empty file each time it is made."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from hybrid_strategy.files import write_text

METRICS_FILE = "metrics.csv"
_PART = "metrics.part{number}.csv"
_NUMBER = re.compile(r"^metrics\.part(\d+)\.csv$")
_STEP = "step"

Row = Mapping[str, str]


def set_aside(folder: Path, keep: bool) -> None:
    """Moves the file of the last attempt out of the logger's way; where the run starts anew its rows are dropped."""
    path = folder / METRICS_FILE
    if not keep:
        path.unlink(missing_ok=True)
        for part in _parts(folder):
            part.unlink(missing_ok=True)
        return
    numbers = [int(found[1]) for part in _parts(folder) if (found := _NUMBER.match(part.name))]
    path.rename(folder / _PART.format(number=max(numbers, default=0) + 1))


def merge_parts(folder: Path) -> None:
    """One file of all attempts: rows of an earlier one count up to the step at which the next one went on."""
    parts = _parts(folder)
    if not parts:
        return
    write_text(folder / METRICS_FILE, _text(read_rows(folder)))
    for part in parts:
        part.unlink(missing_ok=True)


def read_rows(folder: Path) -> list[Row]:
    """The rows of all attempts, in order of steps."""
    rows: list[Row] = []
    for path in (*_parts(folder), folder / METRICS_FILE):
        newer = read_csv(path)
        if newer:
            first = min(_step(row) for row in newer)
            rows = [row for row in rows if _step(row) < first] + newer
    return rows


def read_csv(path: Path) -> list[Row]:
    """The rows of one file; a line that is still being written is left out."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError:
        return []
    whole = text[: text.rfind("\n") + 1]
    return [row for row in csv.DictReader(io.StringIO(whole)) if (row.get(_STEP) or "").isdigit()]


def series(rows: Sequence[Row], name: str) -> list[tuple[int, float]]:
    """The values of one metric by step; steps without it are left out."""
    found = []
    for row in rows:
        text = row.get(name) or ""
        try:
            found.append((_step(row), float(text)))
        except ValueError:
            continue
    return found


def _parts(folder: Path) -> list[Path]:
    found = [(int(match[1]), path) for path in folder.glob("metrics.part*.csv") if (match := _NUMBER.match(path.name))]
    return [path for _, path in sorted(found)]


def _step(row: Row) -> int:
    return int(row[_STEP])


def _text(rows: Sequence[Row]) -> str:
    names = list(dict.fromkeys(name for row in rows for name in row if name is not None))
    out = io.StringIO()
    writer = csv.DictWriter(out, names, restval="", extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()
