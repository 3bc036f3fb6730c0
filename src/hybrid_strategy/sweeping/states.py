"""The states of a point, and what each counts as."""

from __future__ import annotations

PENDING, RUNNING = "pending", "running"
OK, FAILED, OOM, TIMEOUT, PREEMPTED, CANCELLED = "ok", "failed", "oom", "timeout", "preempted", "cancelled"
SKIPPED = "skipped"

STUCK = "it will not start as it is"
"""Said of a point that waits in vain."""

ENDED = (OK, FAILED, OOM, TIMEOUT, PREEMPTED, CANCELLED)
"""States that a `result.json` may have."""

ALL = (OK, RUNNING, PENDING, FAILED, OOM, TIMEOUT, PREEMPTED, CANCELLED, SKIPPED)
"""In the order in which they are counted for people."""


def bad(state: str) -> bool:
    """Does the sweep end with code 5 because of it? A point that is skipped was never to be run."""
    return state in ENDED and state != OK
