"""Files that other processes read while they are written: never half of one, and one sweep of a folder at a time."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hybrid_strategy.errors import ConfigError, message

_LOCK = ".lock"


def write_text(path: Path, text: str) -> None:
    """Replaces `path` in one step; a reader sees the old text or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        beside.write_text(text, encoding="utf-8")
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """As `write_text`. Numbers that are not finite become text, which every reader of JSON understands."""
    write_text(path, json.dumps(_finite(value), indent=2) + "\n")


def read_json(path: Path) -> dict[str, Any] | None:
    """The mapping in `path`; None where there is none that can be read."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def _finite(value: Any) -> Any:
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return value


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
