"""The verdict as a table: what was compared, how far it lies apart, what is allowed, what differs first and why."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table

from hybrid_strategy.parity.report import ParityReport, Row


def print_report(report: ParityReport, console: Console) -> None:
    """Prints a report; lines to read are printed whole, whatever the width."""
    console.print(_table(report))
    if report.first is not None:
        _line(console, "first", str(report.first))
    for cause in report.diagnoses:
        _line(console, "cause", cause)
    for note in report.notes:
        _line(console, "note", note)
    _line(console, "bounds", report.reason)
    verdict = "the numbers of one process" if report.same else "numbers that differ from one process"
    console.print(f"{report.layout} gives {verdict}", style="bold green" if report.same else "bold red", soft_wrap=True)


def _line(console: Console, word: str, text: str) -> None:
    console.print(f"{word}: ", style="bold", end="", soft_wrap=True)
    console.print(text, markup=False, soft_wrap=True)


def _table(report: ParityReport) -> Table:
    title = f"parity of {report.layout} with one process: {report.settings}"
    table = Table(box=box.SIMPLE, pad_edge=False, title=title, title_justify="left")
    for name, right in (
        ("quantity", False),
        ("compared", False),
        ("apart", True),
        ("allowed", True),
        ("", False),
        ("verdict", False),
    ):
        table.add_column(name, justify="right" if right else "left", no_wrap=not name)
    for row in report.rows:
        table.add_row(*_cells(row))
    return table


def _cells(row: Row) -> tuple[str, ...]:
    verdict = "same" if row.same else "DIFFERENT"
    return row.quantity, row.compared, _number(row.difference), _number(row.allowed), row.unit, verdict


def _number(value: float) -> str:
    return "0" if value == 0 else f"{value:.1e}"
