"""Where the output of a rank goes: a file for every rank, and the terminal as well for rank 0."""

from __future__ import annotations

import io
import os
import re
import sys
from pathlib import Path
from typing import TextIO

_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Tee(io.TextIOBase):
    """Writes to the terminal and, without colours and overwritten lines, to the log."""

    def __init__(self, terminal: TextIO, log: TextIO) -> None:
        self._terminal, self._log, self._line = terminal, log, ""

    def write(self, text: str) -> int:
        self._terminal.write(text)
        *done, self._line = (self._line + text).split("\n")
        for line in done:
            self._log.write(_settle(line) + "\n")
        self._line = _settle(self._line, keep_end=True)
        return len(text)

    def flush(self) -> None:
        self._terminal.flush()
        self._log.flush()

    def close(self) -> None:
        """Writes what has no line end yet; the streams stay open."""
        if self._line:
            self._log.write(_settle(self._line) + "\n")
            self._line = ""
        self.flush()

    def isatty(self) -> bool:
        return self._terminal.isatty()

    def fileno(self) -> int:
        return self._terminal.fileno()

    def writable(self) -> bool:
        return True

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._terminal.encoding


def _settle(line: str, keep_end: bool = False) -> str:
    """What is left of a line after its carriage returns; `keep_end` keeps a trailing one, which may yet become a line end."""
    end = "\r" if keep_end and line.endswith("\r") else ""
    return _ANSI.sub("", line.rstrip("\r").rpartition("\r")[2]) + end


def redirect(path: Path, terminal: bool) -> None:
    """Sends file descriptors 1 and 2 of this process to `path`; with `terminal`, Python's own output goes there too.

    The terminal keeps what Python prints (the progress bar stays alive on it) and is spared what native libraries print.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    streams = [os.dup(descriptor) for descriptor in (1, 2)] if terminal else []
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    if not terminal:
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        return
    text = os.fdopen(log, "w", encoding="utf-8", errors="replace", buffering=1)
    out, err = (os.fdopen(each, "w", encoding="utf-8", errors="replace", buffering=1) for each in streams)
    sys.stdout, sys.stderr = Tee(out, text), Tee(err, text)
