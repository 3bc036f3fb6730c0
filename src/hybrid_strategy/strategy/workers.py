"""Workers of data loaders outlive a request to stop: the rank asks them for the batch it stops before, and ends them itself.

Slurm signals every process of a step, and a terminal every process of the foreground. torch's workers die of it at once, and the
rank with them, in the middle of a step (torch 2.13, utils/data/_utils/signal_handling.py).
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType

_GRACE_SECONDS = 60
"""After SIGTERM a worker ends in this time, in case it came from a parent that wants to be rid of it."""

_PARENTS_ALONE = ("SIGINT", "SIGUSR1", "SIGUSR2")


class PatientWorker:
    """A `worker_init_fn` that makes the worker patient, then calls the user's.

    Args:
        then: the user's own; None: there is none.
    """

    def __init__(self, then: Callable[[int], None] | None) -> None:
        self._then = then

    def __call__(self, worker_id: int) -> None:
        signal.signal(signal.SIGTERM, _end_later)
        for name in _PARENTS_ALONE:
            if hasattr(signal, name):
                signal.signal(getattr(signal, name), signal.SIG_IGN)
        if self._then is not None:
            self._then(worker_id)


def _end_later(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(_GRACE_SECONDS)
