"""Files that other processes read while they are written: never half of one; and where they are kept."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any


def cache_folder(cache_dir: str | Path | None = None) -> Path:
    """Where this user's prepared text and measurements are kept, by default `~/.cache/hybrid_strategy`."""
    chosen = cache_dir or os.environ.get("HYBRID_STRATEGY_CACHE") or "~/.cache/hybrid_strategy"
    return Path(chosen).expanduser()


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
    """As `write_text`, of `json_of`."""
    write_text(path, json_of(value) + "\n")


def json_of(value: Any) -> str:
    """JSON. Numbers that are not finite become text, which every reader of JSON understands."""
    return json.dumps(_finite(value), indent=2)


def read_json(path: Path) -> dict[str, Any] | None:
    """The mapping in `path`; None where there is none that can be read."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def as_number(value: Any) -> float | None:
    """A number that `write_json` has written and `read_json` read, also one that is not finite; None for all else.

    >>> as_number(2), as_number("nan"), as_number("-inf"), as_number("2"), as_number(None), as_number(True)
    (2.0, nan, -inf, None, None, None)
    """
    if isinstance(value, bool) or not (isinstance(value, (int, float)) or value in ("nan", "inf", "-inf")):
        return None
    return float(value)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return value


def lock_file(path: Path) -> int | None:
    """The open file, locked and empty; None where another process has it. The lock is the system's: it ends with its process.

    A file that its holder removed meanwhile is opened anew; on a file system without locks everybody gets it.
    """
    while True:
        handle = os.open(path, os.O_CREAT | os.O_RDWR, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            os.close(handle)
            return None
        except OSError:
            return handle
        with suppress(FileNotFoundError):
            if os.stat(path).st_ino == os.fstat(handle).st_ino:
                os.ftruncate(handle, 0)
                return handle
        os.close(handle)
