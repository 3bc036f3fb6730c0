"""The planner's report for people: tables, picture, overrides to paste."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table as RichTable

from hybrid_strategy.planning.report import PlanReport, Table

EXPLAINED = ("memory", "communication", "decision")
"""What `hybrid plan --explain` takes."""

_RIGHT = {"#", "dp", "tp", "pp", "mbs", "m", "GiB/GPU", "GiB", "step", "tokens/s/GPU", "MFU", "HFU", "size", "sent", "calls"}
_WORDS = {"sharding", "schedule", "recompute", "line", "kind", "change", "axis", "what", "group"}
_FOLDED = {"formula", "reason"}


def print_report(report: PlanReport, console: Console) -> None:
    """Everything that a reader needs to decide."""
    console.print(f"\n{report.title}", style="bold", markup=False, soft_wrap=True)
    _print_table("the best layouts (m: micro-batches of mbs samples on a rank; v: stages a rank)", report.layouts, console)
    _print_table("where the step goes", report.steps, console)
    _print_table("what the memory of the fullest rank holds, GiB", report.memories, console)
    _print_table("the best one with one thing changed", report.losers, console)
    _print_decisions(report, console)
    _print_placement(report, console)
    for note in report.notes:
        console.print(note, markup=False, soft_wrap=True)
    job = report.job
    console.print(f"\nthe best one, to paste ({_sbatch(job['nodes'], job['ntasks_per_node'])}):", style="bold", markup=False)
    console.print(" ".join(report.overrides), markup=False, soft_wrap=True)


def print_explained(report: PlanReport, what: str, console: Console) -> None:
    """Every line of the ledger or the bill with its formula and its source, or the rules of the decision."""
    console.print(f"\n{report.title}", style="bold", markup=False, soft_wrap=True)
    if what == "decision":
        _print_decisions(report, console)
        return
    rows = report.memory if what == "memory" else report.bill
    if not rows:
        console.print("one process sends nothing", markup=False)
        return
    _print_table(what, [{name: text for name, text in row.items() if name != "source"} for row in rows], console)
    for source in dict.fromkeys(row["source"] for row in rows if row["source"]):
        names = [row.get("line") or f"{row['axis']} {row['what']}" for row in rows if row["source"] == source]
        console.print(f"{source}: {', '.join(names)}", markup=False, soft_wrap=True)


def print_ladder(report: PlanReport, console: Console) -> None:
    """The order in which to bring the run up: a command a line, so that it can be pasted."""
    console.print(f"\n{report.title}", style="bold", markup=False, soft_wrap=True)
    for number, row in enumerate(report.ladder, start=1):
        console.print(f"\n{number}. {row['step']}: expect {row['expected']}", style="bold", markup=False, soft_wrap=True)
        console.print(row["command"], markup=False, soft_wrap=True)
        console.print(f"   compare: {row['compare']}", markup=False, soft_wrap=True)


def print_reliefs(rows: Table, console: Console) -> None:
    """The cheapest changes after which something fits."""
    if not rows:
        console.print("no single change makes it fit", markup=False)
        return
    console.print("\nthe cheapest changes after which it fits:", style="bold", markup=False)
    for row in rows:
        expected = f"{row['layout']}, {row['GiB/GPU']} GiB a GPU, {row['step']} a step"
        console.print(f"  {row['overrides']}    # {expected}", markup=False, soft_wrap=True)


def _sbatch(nodes: int, tasks: int) -> str:
    return f"sbatch --nodes={nodes} --ntasks-per-node={tasks} --gpus-per-node={tasks}"


def _print_table(title: str, rows: Table, console: Console) -> None:
    if not rows:
        return
    table = RichTable(box=box.SIMPLE, pad_edge=False, title=title, title_justify="left", title_style="bold", padding=(0, 1, 0, 0))
    for name in rows[0]:
        numeric = name in _RIGHT or name not in _WORDS | _FOLDED
        table.add_column(name, justify="right" if numeric else "left", overflow="fold", no_wrap=name not in _FOLDED)
    for row in rows:
        table.add_row(*row.values())
    console.print(table)


def _print_decisions(report: PlanReport, console: Console) -> None:
    console.print("how it is decided", style="bold", markup=False)
    for row in report.decisions:
        console.print(f"  {row['question']} {row['answer']}", markup=False, soft_wrap=True)
        console.print(f"      {row['numbers']}", style="dim", markup=False, soft_wrap=True)
    console.print()


def _print_placement(report: PlanReport, console: Console) -> None:
    """A row a node, a cell a GPU."""
    width = max(len(cell) for row in report.placement for cell in row)
    console.print("where the ranks sit (p: pipeline, d: data, t: tensor)", style="bold", markup=False)
    nodes = report.job["nodes"]
    for number, row in enumerate(report.placement):
        cells = " | ".join(f"{cell:<{width}}" for cell in row)
        console.print(f"  node {number:<4} {cells}".rstrip(), markup=False, soft_wrap=True)
    if nodes > len(report.placement):
        console.print(f"  ... and {nodes - len(report.placement)} more nodes", markup=False)
    console.print()
