"""The life of a point in its folder: begun, concluded, begun again. Needs no torch, so that a batch script can call it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hybrid_strategy.config.resume import newest_good
from hybrid_strategy.config.storage import PREEMPTED_FILE, RESULT_FILE, moved, read_config, write_config
from hybrid_strategy.files import read_json, write_json
from hybrid_strategy.sweeping import states
from hybrid_strategy.sweeping.metrics import METRICS_FILE, merge_parts, set_aside
from hybrid_strategy.sweeping.points import Point, read_point

STATE_FILE = "state.json"
STATUS_FILE = "status.json"
"""Written by the first rank while it trains: step, loss, speed."""


@dataclass(frozen=True)
class State:
    """Where a point stands.

    Attributes:
        state: a word of `sweeping/states.py`.
        reason: why, in a line, where it did not end well.
        attempt: 1 for the first start.
        started, ended: of this attempt, in seconds since the epoch; 0: not yet.
        earlier_seconds: what the attempts before this one took together.
        job: of the Slurm job, as `scontrol` names it.
        requeues: how often it was put back into the queue.
    """

    state: str = states.PENDING
    reason: str = ""
    attempt: int = 0
    started: float = 0.0
    ended: float = 0.0
    job: str = ""
    requeues: int = 0
    earlier_seconds: float = 0.0

    def seconds(self, now: float) -> float | None:
        """What all attempts took together, up to now where one is running; None where none has begun."""
        return self.earlier_seconds + (self.ended or now) - self.started if self.started else None


def read_state(folder: Path) -> State:
    """The state of a point; `pending` where it was never started."""
    values = read_json(folder / STATE_FILE) or {}
    known = set(State.__dataclass_fields__)
    return State(**{key: value for key, value in values.items() if key in known})


def write_state(folder: Path, state: State) -> None:
    """Replaces the state."""
    write_json(folder / STATE_FILE, vars(state))


def ended_at(folder: Path, state: State) -> float:
    """When the attempt ended; of one that could not say so, when it was last heard of."""
    if state.ended or not state.started:
        return state.ended
    try:
        return max(state.started, (folder / STATUS_FILE).stat().st_mtime)
    except OSError:
        return state.started


def note_abandoned(points: Sequence[Point]) -> None:
    """Points that run on this machine are children of a command that is not there any more: they can go on."""
    for point in points:
        state = read_state(point.folder)
        if state.state == states.RUNNING and not state.job:
            ended, reason = ended_at(point.folder, state), "the command that ran it was killed"
            write_state(point.folder, replace(state, state=states.PENDING, reason=reason, ended=ended))


def begin(folder: Path, job: str = "", requeues: int = 0) -> State:
    """Makes the folder ready for one more attempt: it goes on from the newest good checkpoint there, else from where the point
    was told to start, and loses nothing logged.

    Args:
        job: of Slurm that runs the attempt; empty: it runs on this machine, whatever has run it before.
    """
    before, point = read_state(folder), read_point(folder)
    earlier = replace(before, ended=ended_at(folder, before)).seconds(0.0) or 0.0
    checkpoint = newest_good(folder)
    anew = (STATUS_FILE,) if checkpoint is None else ()  # where nothing is left to do, what the last attempt reached stands
    for name in (RESULT_FILE, PREEMPTED_FILE, *anew):
        (folder / name).unlink(missing_ok=True)
    for path in (folder / "logs").glob("rank*.error.json"):
        path.unlink(missing_ok=True)
    if (folder / METRICS_FILE).exists():
        set_aside(folder, keep=checkpoint is not None)
    config = read_config(folder)
    if config.paths.run_dir is not None and Path(config.paths.run_dir) != folder:  # the sweep's folder was moved
        config = moved(config, config.paths.run_dir, str(folder))
    start = point.start if point is not None else None
    write_config(replace(config, resume=str(checkpoint) if checkpoint else start), folder)
    state = State(states.RUNNING, "", before.attempt + 1, time.time(), 0.0, job, requeues, earlier)
    write_state(folder, state)
    return state


def conclude(folder: Path, state: str, reason: str, further: dict[str, Any] | None = None) -> State:
    """Writes how the attempt ended: `result.json` for good, `state.json` beside it."""
    merge_parts(folder)
    before = read_state(folder)
    now = replace(before, state=state, reason=reason, ended=before.ended or time.time())
    result = read_json(folder / RESULT_FILE) or {}
    account = {"state": state, "reason": reason, "attempts": now.attempt, "wall_seconds": now.seconds(now.ended), "job": now.job}
    write_json(folder / RESULT_FILE, {**account, **result, **account, **(further or {})})
    write_state(folder, now)
    return now
