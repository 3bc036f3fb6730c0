"""A request to stop: a signal only sets it; training finds it between two steps, saves a checkpoint and leaves.

No torch here: a worker process listens from its first moment on, long before it has imported what it trains with.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

Handler = Callable[[int, FrameType | None], Any] | int | None

SIGNALS_VARIABLE = "HYBRID_STRATEGY_STOP_SIGNALS"
"""Names of the signals to hear, e.g. `USR1,USR2,TERM`; who starts the ranks knows what it sends. Default: `TERM,USR1,INT`."""

INSISTENCE = 3
"""The Ctrl-C that ends the process at once, whatever it is doing."""


def signals_to_hear() -> list[signal.Signals]:
    """The signals that ask this process to stop."""
    names = os.environ.get(SIGNALS_VARIABLE) or "TERM,USR1,INT"
    return [signal.Signals[f"SIG{name.strip()}"] for name in names.split(",") if name.strip()]


class StopRequest:
    """What the signals of this process have asked for.

    Attributes:
        signal_number: of the first signal; 0 while none has come. Further ones change nothing.
    """

    def __init__(self) -> None:
        self.signal_number = 0
        self._interrupts = 0
        self._before: dict[int, Handler] = {}
        self._leave: Callable[[], None] | None = None

    @property
    def listening(self) -> bool:
        """The handlers are in place."""
        return bool(self._before)

    @property
    def name(self) -> str:
        """Name of the signal."""
        return signal.Signals(self.signal_number).name

    def listen(self, *further: int) -> None:
        """Puts the handlers in place; handlers that somebody else had installed are called after ours.

        Does nothing outside of the main thread, where Python knows no signals.

        Args:
            further: numbers of signals to hear beside `signals_to_hear`.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        for number in {*signals_to_hear(), *further} - self._before.keys():
            self._before[number] = signal.signal(number, self._receive)

    @contextmanager
    def leaving_by(self, leave: Callable[[], None]) -> Iterator[None]:
        """Within it there is nothing to save yet: a signal calls `leave`, which raises, wherever the process is.

        One that has come before calls it at once.
        """
        try:
            self._leave = leave
            if self.signal_number:
                leave()
            yield
        finally:
            self._leave = None

    def ignore(self) -> None:
        """Puts the former handlers back and forgets what has come."""
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before.clear()
        self.signal_number = self._interrupts = 0

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.signal_number = self.signal_number or number
        self._interrupts += number == signal.SIGINT
        if self._interrupts >= INSISTENCE:
            raise KeyboardInterrupt
        if self._leave is not None:
            self._leave()
        former = self._before.get(number)
        if callable(former) and former is not signal.default_int_handler:
            former(number, frame)


REQUEST = StopRequest()
"""That of this process: signals belong to the process."""
