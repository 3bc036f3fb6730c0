"""What libraries say of themselves goes to the rank's log, so that the terminal is left to the plan, the progress and the end."""

from __future__ import annotations

import logging
import os
import re
import sys
import warnings
from typing import TextIO

_LIBRARIES = re.compile(r"[/\\](torch|lightning|lightning_fabric|pytorch_lightning|torchmetrics|wandb)[/\\]")
_IGNORED = (
    "Experiment logs directory",  # metrics.csv stands beside the configuration
    "Checkpoint directory .* exists",
    ".*does not have many workers",  # tokens come from a memory map
)


def keep_terminal_clear(logged: bool = True) -> None:
    """Sends the log lines and warnings of torch, Lightning and W&B to file descriptor 2, which a launcher's rank has on its log.

    Warnings of everything else are shown, by their text alone.

    Args:
        logged: false for a process without a log, whose file descriptor 2 is the terminal: they are dropped.
    """
    where = 2 if logged else os.open(os.devnull, os.O_WRONLY)
    log = open(where, "w", encoding="utf-8", errors="replace", buffering=1, closefd=False)  # noqa: SIM115
    for name in ("lightning.pytorch", "lightning.fabric", "torch", "wandb"):
        for handler in logging.getLogger(name).handlers:
            if isinstance(handler, logging.StreamHandler):
                handler.setStream(log)
    for text in _IGNORED:
        warnings.filterwarnings("ignore", message=text)

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if _LIBRARIES.search(filename) or issubclass(category, (DeprecationWarning, FutureWarning)):
            log.write(warnings.formatwarning(message, category, filename, lineno, line))
        elif os.environ.get("RANK", "0") == "0":
            sys.stderr.write(f"warning: {message}\n")

    warnings.showwarning = show
