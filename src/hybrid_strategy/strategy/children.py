"""The ranks that a user's script started: they end when the script that started them ends by an exception.

Lightning's script launcher is the process of rank 0. If that fails while another rank computes in the user's code, or waits on a
backend that does not notice lost peers (NCCL), nobody would end the other rank.
"""

from __future__ import annotations

import atexit
import subprocess
import sys
import time
import weakref
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Protocol

GRACE_SECONDS = 3.0
"""The others may still say what happened to them: theirs may be the cause."""


class Parent(Protocol):
    """What has started processes."""

    procs: list[subprocess.Popen[Any]]


_parents: weakref.WeakSet[Any] = weakref.WeakSet()


def end_with_this_process(parent: Parent) -> None:
    """Ends what `parent` has started after this process has failed by an exception that nobody caught."""
    if not isinstance(sys.excepthook, _Hook):
        sys.excepthook = _Hook(sys.excepthook)
    _parents.add(parent)


class _Hook:
    """Stands before the hook for exceptions that nobody caught."""

    def __init__(self, before: Any) -> None:
        self._before = before

    def __call__(self, kind: type[BaseException], error: BaseException, place: TracebackType | None) -> None:
        self._before(kind, error, place)
        atexit.register(end, [each for parent in _parents for each in parent.procs], GRACE_SECONDS)


def end(children: Sequence[subprocess.Popen[Any]], grace_seconds: float) -> None:
    """Kills those that have not ended by themselves within `grace_seconds`."""
    deadline = time.monotonic() + grace_seconds
    while any(each.poll() is None for each in children) and time.monotonic() < deadline:
        time.sleep(0.05)
    for each in children:
        if each.poll() is None:
            each.kill()
            each.wait()
