"""The table of points, on screens of any width."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from hybrid_strategy.sweeping.book import Book
from hybrid_strategy.sweeping.rows import Row
from hybrid_strategy.sweeping.screen import opening, summary, table
from tests.support.sweep_points import ended_point

ROWS = (
    Row("dp2_tp2_zero1_m8", "ok", "", 100, 100, 2.1234, 123456.0, None, 3e9, 3700.0),
    Row("pp2", "failed", "rank 1: ValueError: made [to] fail", 7, 100, None, None, None, 3e9, 12.0),
)


def test_a_run_is_not_called_a_sweep(tmp_path: Path) -> None:
    point = ended_point(tmp_path, "run", {}, 2.0)
    lines = [opening(Book(point.folder, (point,), (), {"single": single}), [point]) for single in (True, False)]
    assert lines == [["run run", f"folder: {point.folder}"], ["sweep run: 1 point", f"folder: {point.folder}"]]
    assert summary(ROWS[:1]) == "1 ok"


def test_no_time_is_told_where_a_point_takes_longer_than_those_before_it() -> None:
    running = [Row("tp2", "running", "", 7, 100, None, None, None, None, seconds) for seconds in (3600.0, 9000.0)]
    assert summary([ROWS[0], running[0]]) == "1 ok, 1 running, about 1 min 40 s left, best so far dp2_tp2_zero1_m8"
    assert summary([ROWS[0], running[1]]) == "1 ok, 1 running, best so far dp2_tp2_zero1_m8"


def test_no_time_is_told_where_nothing_is_running() -> None:
    """A sweep that was stopped, or whose jobs wait for others."""
    waiting = Row("tp2", "pending", "", None, 100, None, None, None, None, None)
    assert summary([ROWS[0], waiting]) == "1 ok, 1 pending, best so far dp2_tp2_zero1_m8"


@pytest.mark.parametrize("width", [48, 60, 80, 120])
def test_names_states_and_reasons_have_room_on_every_screen(width: int) -> None:
    out = io.StringIO()
    Console(file=out, width=width, color_system=None).print(table(ROWS, width, live=False))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    assert "…" not in out.getvalue()
    for word in ("dp2_tp2_zero1_m8", "failed", "ValueError", "[to]"):
        assert any(word in line for line in lines)
    assert ("2.1234" in out.getvalue()) == (width >= 60)
    assert ("2.79 GiB" in out.getvalue()) == (width == 120)
