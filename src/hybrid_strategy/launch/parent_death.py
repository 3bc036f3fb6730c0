"""A rank whose parent died ends itself: nothing is left running after a `kill -9` of the command."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time

PARENT_VARIABLE = "HYBRID_STRATEGY_PARENT_PID"
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_POLL_SECONDS = 0.5


def guard() -> None:
    """Ties the life of this process to that of the process named in the environment; without a name, does nothing."""
    parent = os.environ.get(PARENT_VARIABLE)
    if parent is None:
        return
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        threading.Thread(target=_watch, args=(int(parent),), daemon=True, name="parent-watch").start()
    if os.getppid() != int(parent):  # it died before the line above
        os._exit(1)


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_POLL_SECONDS)
    os._exit(1)
