"""Signals of a process that has nothing to save yet, at every line where one may come."""

from __future__ import annotations

import signal
import sys
from types import FrameType
from typing import Any

import pytest

from hybrid_strategy.checkpoint.stop_request import StopRequest


class _LeaveError(Exception):
    """What leaving is."""


def _leave() -> None:
    raise _LeaveError


@pytest.mark.parametrize("line", range(1, 6))
def test_a_signal_at_any_line_before_the_imports_leaves_once(line: int) -> None:
    request, seen = StopRequest(), 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal seen
        if frame.f_code.co_name != "leaving_by":
            return trace if frame.f_code.co_name == "__enter__" else None
        if event == "line":
            seen += 1
            if seen == line:
                request._receive(signal.SIGTERM, None)
        return trace

    entered, before = False, sys.gettrace()
    try:
        sys.settrace(trace)
        with request.leaving_by(_leave):
            sys.settrace(before)
            entered = True
    except _LeaveError:
        pass
    finally:
        sys.settrace(before)
    assert entered == (request.signal_number == 0), "the signal was not heard"
    request._receive(signal.SIGTERM, None)  # a second one while the failure is written: nothing is raised
