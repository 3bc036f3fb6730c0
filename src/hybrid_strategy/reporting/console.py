"""One console for everything a command prints: colours on a terminal, plain text without escape codes elsewhere."""

from __future__ import annotations

import sys
from typing import TextIO

from rich.console import Console

_PLAIN_WIDTH = 120


def make_console(stream: TextIO | None = None) -> Console:
    """A console on `stream` (standard output); where that is no terminal, lines are as wide as a log can bear."""
    file = stream or sys.stdout
    if file.isatty():
        return Console(file=file, highlight=False)
    return Console(file=file, highlight=False, width=_PLAIN_WIDTH, color_system=None, force_terminal=False, soft_wrap=False)
