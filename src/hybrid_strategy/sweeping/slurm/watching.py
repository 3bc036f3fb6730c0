"""Where Slurm jobs stand, and what came of those that could not say so themselves."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from hybrid_strategy.config.storage import RESULT_FILE
from hybrid_strategy.errors import RunError
from hybrid_strategy.sweeping import states
from hybrid_strategy.sweeping.attempts import State, conclude, ended_at, read_state, write_state
from hybrid_strategy.sweeping.causes import cause_of
from hybrid_strategy.sweeping.points import Point
from hybrid_strategy.sweeping.slurm import commands
from hybrid_strategy.sweeping.slurm.job import batch_log_tail, with_step

_ALIVE = (
    "PENDING",
    "RUNNING",
    "CONFIGURING",
    "SUSPENDED",
    "REQUEUED",
    "REQUEUE_FED",
    "REQUEUE_HOLD",
    "RESIZING",
    "SIGNALING",
    "STOPPED",
)
_WAITING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD")
_FOR_EVER = (
    "AccountNotAllowed",
    "AssocMaxNodePerJobLimit",
    "AssocMaxWallDurationPerJobLimit",
    "BadConstraints",
    "DependencyNeverSatisfied",
    "InvalidAccount",
    "InvalidQOS",
    "JobHeldAdmin",
    "JobHeldUser",
    "PartitionConfig",
    "PartitionNodeLimit",
    "PartitionTimeLimit",
    "QOSMaxNodePerUserLimit",
    "QOSMaxWallDurationPerJobLimit",
    "QOSNotAllowed",
)
"""Reasons that no waiting ends: the job asks for what is not there, or somebody holds it."""

_PATIENCE_SECONDS = 5.0
"""Time for the job's own last words to arrive over a shared file system."""

_BY_SLURM = {
    "TIMEOUT": (states.TIMEOUT, "it reached its time limit"),
    "DEADLINE": (states.TIMEOUT, "it reached its deadline"),
    "CANCELLED": (states.CANCELLED, "cancelled"),
    "PREEMPTED": (states.PREEMPTED, "preempted, and not put back into the queue"),
    "OUT_OF_MEMORY": (states.OOM, "a process was ended for using more memory than the job had asked for"),
    "NODE_FAIL": (states.FAILED, "a node failed"),
    "BOOT_FAIL": (states.FAILED, "a node did not start"),
}


@dataclass
class Watcher:
    """Looks at jobs and brings the points' files up to date.

    Attributes:
        patience_seconds: time from the end of a job until it is concluded from outside.
        outage: what Slurm's commands said last, where they failed; what is known of the jobs is old then.
    """

    patience_seconds: float = _PATIENCE_SECONDS
    _ended_at: dict[str, float] = field(default_factory=dict)
    outage: str = ""

    def look(self, points: Sequence[Point]) -> list[Point]:
        """The points that are still alive; a controller that does not answer changes nothing."""
        jobs = {point.name: read_state(point.folder).job for point in points}
        try:
            found = commands.queue([job for job in jobs.values() if job])
            self.outage = ""
        except RunError as error:
            self.outage = str(error)
            return list(points)
        return [point for point in points if self._is_alive(point, *found.get(jobs[point.name], ("", "")))]

    def _is_alive(self, point: Point, slurm: str, reason: str) -> bool:
        state = read_state(point.folder)
        if not state.job:
            return False
        if slurm in _ALIVE:
            self._ended_at.pop(point.name, None)
            self._note(point, state, slurm, reason)
            return True
        concluded = state.state in states.ENDED and (point.folder / RESULT_FILE).exists()
        if concluded and state.state == states.OK:
            return False
        if slurm == "COMPLETING":  # where a node has failed its script says `failed`, and Slurm puts the job back after this
            return True
        if concluded:
            return False
        since = self._ended_at.setdefault(point.name, time.monotonic())
        if time.monotonic() - since < self.patience_seconds:
            return True
        self._conclude(point, slurm or commands.ended_as(state.job))
        return False

    def _note(self, point: Point, state: State, slurm: str, reason: str) -> None:
        """A job that waits (again) says what for; one that was put back has no result, whatever its last attempt thought."""
        if slurm in _WAITING:
            never = f"; {states.STUCK}" if reason in _FOR_EVER else ""
            words = "" if reason in ("None", "") else f"waiting: {reason}{never}"
            told = state.reason.partition("waiting: ")[0].removesuffix(" (") if state.requeues or state.attempt else ""
            text = told + (f" ({words})" if words else "") if told else words
            if state.state != states.PENDING or state.reason != text:
                (point.folder / RESULT_FILE).unlink(missing_ok=True)
                write_state(point.folder, replace(state, state=states.PENDING, reason=text, ended=ended_at(point.folder, state)))

    def _conclude(self, point: Point, slurm: str) -> None:
        folder, state = point.folder, read_state(point.folder)
        write_state(folder, replace(state, ended=ended_at(folder, state)))  # this may be days later
        if slurm in _BY_SLURM:
            word, reason = _BY_SLURM[slurm]
            conclude(folder, word, with_step(folder, reason))
            return
        if slurm == "COMPLETED" and (folder / RESULT_FILE).exists():
            conclude(folder, states.OK, "")
            return
        if state.state == states.PENDING and not slurm:  # of a task of an array that never began Slurm keeps nothing
            conclude(folder, states.CANCELLED, "cancelled while it waited")
            return
        said = batch_log_tail(folder)
        if not said and not slurm:
            conclude(folder, states.FAILED, "Slurm no longer knows the job, and it left no result")
            return
        cause = cause_of(folder, point.resources.world_size, said)
        conclude(folder, cause.state, cause.reason, cause.further())


def outage_line(text: str) -> str:
    """What to tell while Slurm does not answer."""
    return f"Slurm does not answer, so this is how its jobs stood last: {' '.join(text.split())}"
