"""One command at a time runs the points of a sweep's folder."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hybrid_strategy.errors import ConfigError, message

_LOCK = ".lock"


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Only one command at a time runs the points of a folder; what a killed one left behind is taken over.

    Raises:
        ConfigError: another command is at it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / _LOCK
    while True:
        try:
            handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
            break
        except FileExistsError:
            _take_over(path, folder)
    with os.fdopen(handle, "w", encoding="utf-8") as lock:
        lock.write(f"{socket.gethostname()} {os.getpid()}")
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def _take_over(path: Path, folder: Path) -> None:
    """Remove the lock of a process of this machine that is gone; refuse where its owner may live."""
    try:
        host, _, pid = path.read_text(encoding="utf-8").partition(" ")
    except FileNotFoundError:
        return
    if host == socket.gethostname() and pid.isdigit() and not Path(f"/proc/{pid}").exists():
        path.unlink(missing_ok=True)
        return
    numbers = f"Process {pid or '?'} on {host or '?'} is running its points"
    advice = f"Wait for it, give the sweep another name, or remove {path} if that process is gone"
    raise ConfigError(message("name", folder.name, "a sweep is run by one command at a time", numbers, advice))
