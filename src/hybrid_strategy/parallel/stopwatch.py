"""How long a play takes and how long of it this rank waits for others: by the clock on a CPU, by events on a GPU's stream."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Stopwatch:
    """Times of one play. Reading it waits for the GPU, so it is put into a player for a few steps only."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._span: tuple[Any, Any] | None = None
        self._waits: list[tuple[Any, Any]] = []

    @contextmanager
    def play(self) -> Iterator[None]:
        """Around one play; what was measured before is forgotten."""
        self._waits = []
        begin = self._mark()
        yield
        self._span = begin, self._mark()

    @contextmanager
    def wait(self) -> Iterator[None]:
        """Around one wait for another rank's result."""
        begin = self._mark()
        yield
        self._waits.append((begin, self._mark()))

    @property
    def span_seconds(self) -> float:
        """From the first to the last cell of the last play."""
        return 0.0 if self._span is None else self._between(*self._span)

    @property
    def waited_seconds(self) -> float:
        """Of it, waiting."""
        return sum(self._between(*each) for each in self._waits)

    def _mark(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, begin: Any, end: Any) -> float:
        if not self._cuda:
            return float(end - begin)
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3
