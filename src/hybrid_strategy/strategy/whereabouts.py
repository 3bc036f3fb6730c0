"""Where a rank is in its step, told when it waits for others in vain.

A rank that fails takes its connections with it, and a rank that hangs lets the timeout of its peers' collectives run out. In both
cases the error arises at the peers, in a call that says nothing of training. So each rank keeps in mind what it does, and says it
with such an error. Where a backend ends the process instead of raising (NCCL), a thread says it first.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

from hybrid_strategy.distributed.groups import Groups
from hybrid_strategy.spec.table import BACKWARD, FORWARD, INPUT, WEIGHT, Cell

_log = logging.getLogger(__name__)
_PASSES = {FORWARD: "forward", BACKWARD: "backward", INPUT: "backward of inputs", WEIGHT: "backward of weights"}
_EARLY = 0.98
"""The thread speaks at this share of the timeout: when it has passed, the process may be gone."""


class Whereabouts:
    """What one rank does.

    Args:
        groups: this rank's place.
    """

    def __init__(self, groups: Groups) -> None:
        place = groups.coordinate
        context = ("context_parallel",) if groups.layout.context_parallel_size > 1 else ()
        axes = ("pipeline_parallel", "data_parallel", *context, "tensor_parallel")
        self.rank = f"rank {groups.rank} ({', '.join(f'{axis} {getattr(place, axis)}' for axis in axes)})"
        self.watch: Watch | None = None
        self._what, self._cell, self._since = "", "", time.monotonic()

    @contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """While this lasts the rank does `what`. An error leaves the place as it was: that is where it arose."""
        outer = self._what
        self._now(what)
        yield
        self._now(outer)

    def at(self, cell: Cell) -> None:
        """The rank begins this cell of the schedule."""
        self._cell = f": stage {cell.stage}, micro-batch {cell.micro_batch}, action {cell} ({_PASSES[cell.kind]})"
        self._since = time.monotonic()

    def after_cells(self, what: str) -> None:
        """All cells are played; the rank goes on with `what`."""
        self._cell, self._since = f": {what}", time.monotonic()

    def describe(self) -> str:
        return f"{self.rank} was in {self._what}{self._cell}" if self._what else f"{self.rank} was between two steps"

    def seconds_here(self) -> float:
        """How long it has been doing the same; 0 between steps, where the user's own code may take its time."""
        return time.monotonic() - self._since if self._what else 0.0

    def add_to(self, error: BaseException, timeout: timedelta) -> None:
        """Adds the place to an error of a collective, and says it in the log."""
        if not is_lost_peer(error):
            return
        text = (
            f"{self.describe()}. Another rank failed or did not come to the same point within "
            f"timeout={timeout.total_seconds():g} s: its own message, or what it was doing, is the cause."
        )
        _log.error(text)
        if hasattr(error, "add_note"):  # Python 3.11
            error.add_note(text)
        else:
            error.args = (f"{error}\n{text}", *error.args[1:])

    def start_watch(self, timeout: timedelta) -> None:
        """Lets a thread say where this rank is when it has not moved for as long as a collective may take."""
        self.stop_watch()
        self.watch = Watch(self, timeout.total_seconds() * _EARLY, _log.error)
        self.watch.start()

    def stop_watch(self) -> None:
        if self.watch is not None:
            self.watch.stop()
        self.watch = None

    def _now(self, what: str) -> None:
        self._what, self._cell, self._since = what, "", time.monotonic()


class Watch(threading.Thread):
    """Says once where the rank is when it has been there for `seconds`, with the Python stack of the thread that trains.

    Args:
        whereabouts: of the rank.
        seconds: how long is too long.
        say: gets the text.
    """

    def __init__(self, whereabouts: Whereabouts, seconds: float, say: Callable[[str], None]) -> None:
        super().__init__(name="hybrid-strategy-watch", daemon=True)
        self._whereabouts, self._seconds, self._say = whereabouts, seconds, say
        self._trainer = threading.get_ident()
        self._over = threading.Event()

    def run(self) -> None:
        said = False
        while not self._over.wait(min(max(self._seconds / 20, 0.05), 10.0)):
            stuck = self._whereabouts.seconds_here() >= self._seconds
            if stuck and not said:
                self._say(f"{self._whereabouts.describe()} for {self._seconds:g} s and more; its Python stack:\n{self._stack()}")
            said = stuck

    def stop(self) -> None:
        self._over.set()

    def _stack(self) -> str:
        frame = sys._current_frames().get(self._trainer)
        return "".join(traceback.format_stack(frame)) if frame is not None else "the thread is gone"


def is_lost_peer(error: BaseException) -> bool:
    """Is this what a collective raises when another rank has gone, or has not come?"""
    if isinstance(error, dist.DistError):
        return True
    text = str(error).lower()
    lost = "pair closure" in text or ("gloo" in text and any(word in text for word in ("timed out", "connection")))
    return isinstance(error, RuntimeError) and lost
