"""One command at a time runs the points of a sweep's folder."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hybrid_strategy.errors import ConfigError, message
from hybrid_strategy.files import lock_file

_LOCK = ".lock"


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Only one command at a time runs the points of a folder. The lock is the system's: it ends with its process.

    Raises:
        ConfigError: another command is at it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    handle = lock_file(folder / _LOCK)
    if handle is None:
        host, pid = holder(folder) or ("", 0)
        numbers = f"Process {pid or '?'} on {host or '?'} is running its points"
        advice = f"Wait for it, end it with `hybrid sweep cancel {folder}`, or give the sweep another name"
        raise ConfigError(message("name", folder.name, "a sweep is run by one command at a time", numbers, advice))
    try:
        os.write(handle, f"{socket.gethostname()} {os.getpid()}".encode())
        yield
    finally:
        (folder / _LOCK).unlink(missing_ok=True)
        os.close(handle)


def abandoned(folder: Path) -> bool:
    """Is no command running the points of a folder? A command of another machine is believed."""
    try:
        host, _, pid = (folder / _LOCK).read_text(encoding="utf-8").partition(" ")
    except FileNotFoundError:
        return True
    here = host == socket.gethostname()
    return here and not (pid.isdigit() and _exists(int(pid))) and holder(folder) is None


def _exists(pid: int) -> bool:
    """For file systems without locks."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # somebody else's
        return True
    return True


def holder(folder: Path) -> tuple[str, int] | None:
    """Host and process of the command that is running the points of a folder; None where none is."""
    path = folder / _LOCK
    if not path.exists():
        return None
    handle = lock_file(folder / _LOCK)
    if handle is not None:
        path.unlink(missing_ok=True)
        os.close(handle)
        return None
    host, _, pid = path.read_text(encoding="utf-8").partition(" ")
    return host, int(pid) if pid.isdigit() else 0
