"""What stands at the end of a run: how good, how fast, where it is, how to go on."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from hybrid_strategy.files import as_number
from hybrid_strategy.units import format_seconds


@dataclass(frozen=True)
class Closing:
    """A finished run. `result` is what `result.json` holds; `resume_command` is empty where there is no checkpoint."""

    result: Mapping[str, Any]
    run_dir: str
    resume_command: str = ""


def print_summary(closing: Closing, console: Console) -> None:
    """Prints the closing summary; values to copy are printed whole, whatever the width."""
    table = Table(box=box.SIMPLE, show_header=False, pad_edge=False, title="done", title_justify="left")
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    copied = []
    for name, text in _rows(closing).items():
        if name in ("run folder", "resume", "W&B"):
            copied.append((name, text))
        else:
            table.add_row(name, text)
    console.print(table)
    for name, text in copied:
        console.print(f"{name}: ", style="bold", end="", soft_wrap=True)
        console.print(text, markup=False, soft_wrap=True)


def _rows(closing: Closing) -> dict[str, str]:
    result = closing.result
    rows = {"steps": f"{result.get('steps', 0):,} in {format_seconds(result.get('seconds', 0.0))}"}
    first, last = as_number(result.get("first_validation_loss")), as_number(result.get("last_validation_loss"))
    if last is not None:
        rows["validation loss"] = f"{last:.4f}" if first is None or first == last else _from_to(first, last)
    if result.get("tokens_per_second"):
        rows["tokens/s"] = f"{result['tokens_per_second']:,.0f}"
    rows["run folder"] = closing.run_dir
    if closing.resume_command:
        rows["resume"] = closing.resume_command
    wandb = result.get("wandb") or {}
    if wandb.get("url"):
        rows["W&B"] = str(wandb["url"])
    elif wandb.get("dir"):
        rows["W&B"] = f"offline; upload with: wandb sync {shlex.quote(str(wandb['dir']))}"
    elif wandb.get("problem"):
        rows["W&B"] = f"not logged: {wandb['problem']}"
    return rows


def _from_to(first: float, last: float) -> str:
    share = f" ({last / first:.1%} of the first)" if first and isfinite(last / first) else ""
    return f"{first:.4f} -> {last:.4f}{share}"
