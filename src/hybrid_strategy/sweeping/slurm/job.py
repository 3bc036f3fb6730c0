"""What a batch script calls before and after `srun`: on the first node of the job, without torch."""

from __future__ import annotations

import os
import re
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hybrid_strategy.config.storage import PREEMPTED_FILE, RESULT_FILE, read_config
from hybrid_strategy.errors import RunError
from hybrid_strategy.files import read_json
from hybrid_strategy.launch.failures import first_failure
from hybrid_strategy.strategy.requeue import slurm_job_id
from hybrid_strategy.sweeping import states
from hybrid_strategy.sweeping.attempts import begin, conclude, read_state, write_state
from hybrid_strategy.sweeping.causes import PREEMPTED_CODE, cause_of, lost_a_node
from hybrid_strategy.sweeping.points import Point, read_point
from hybrid_strategy.sweeping.settings import SlurmSettings
from hybrid_strategy.sweeping.slurm import commands
from hybrid_strategy.sweeping.slurm.script import BATCH_LOG

_TAIL_BYTES = 20_000
_BEFORE_THE_LIMIT = "SIGUSR1"
"""What the script has Slurm send some time before the limit; preemption and requeues come as SIGTERM."""

_STOPPED = re.compile(r"\*\*\* (?:STEP|JOB) [\w.+]+ ON \S+ CANCELLED AT \S+(?: DUE TO ([A-Z ]+))?")


def begin_job(folder: Path) -> int:
    """Readies the folder for this attempt and says in the log what runs here; not 0: it was started too often."""
    point, requeues = _point(folder), int(os.environ.get("SLURM_RESTART_COUNT", "0"))
    most = max_requeues(point)
    if requeues > most:
        conclude(folder, states.FAILED, f"it was put back into the queue {requeues} times, max_requeues is {most}")
        return 1
    state = begin(folder, slurm_job_id(), requeues)
    config, needs = read_config(folder), point.resources
    lines = (
        f"point {point.name}: job {state.job} on {os.environ.get('SLURM_JOB_NODELIST', socket.gethostname())}",
        f"{needs.nodes} nodes x {needs.tasks_per_node} ranks, attempt {state.attempt}, requeued {requeues} x, at most {most} x",
        f"overrides: {' '.join(point.overrides)}",
        f"resuming from {config.resume}" if config.resume else "starting from the beginning",
    )
    sys.stdout.write("\n".join(f"=== {line}" for line in lines) + "\n")
    sys.stdout.flush()
    return 0


def end_job(folder: Path, code: int) -> int:
    """Concludes the attempt by the exit code of `srun` and what the ranks left; puts the job back into the queue where it
    was stopped and may go on. Returns the exit code of the job."""
    point = _point(folder)
    if code == 0 and (folder / RESULT_FILE).exists():
        conclude(folder, states.OK, "")
        return 0
    said = batch_log_tail(folder)
    stopped = [(found[1] or "").strip() for found in _STOPPED.finditer(said)]
    told = _told_to_stop(point)
    if told is not None:
        return _go_on(point, *told) if not _is_cancelled(read_state(folder).job, stopped) else _cancelled(folder, told[0])
    if "PREEMPTION" in stopped or "JOB REQUEUE" in stopped:
        return _go_on(point, "stopped by Slurm before it could save", states.PREEMPTED)
    if "NODE FAILURE" in stopped or lost_a_node(folder, point.resources.world_size, said):
        return _go_on(point, "a node failed", states.FAILED)
    if "TIME LIMIT" in stopped:
        conclude(folder, states.TIMEOUT, with_step(folder, "it reached its time limit"))
        return code or 1
    cause = cause_of(folder, point.resources.world_size, said, code)
    if stopped and not cause.rank and cause.state == states.FAILED:
        conclude(folder, states.CANCELLED, with_step(folder, "cancelled"))
    else:
        conclude(folder, cause.state, cause.reason, cause.further())
    return code or 1


def _told_to_stop(point: Point) -> tuple[str, str] | None:
    """Reason and state where the ranks have left because of a signal."""
    saved = read_json(point.folder / PREEMPTED_FILE)
    if saved is not None and saved.get("signal") == _BEFORE_THE_LIMIT:
        return f"it reached its time limit, saved at step {saved.get('step')}", states.TIMEOUT
    if saved is not None:
        return f"stopped by {saved.get('signal')}, saved at step {saved.get('step')}", states.PREEMPTED
    early = first_failure(point.folder / "logs", point.resources.world_size)
    if early is not None and early.exit_code == PREEMPTED_CODE:  # there was nothing to save yet
        in_time = f"stopped by {_BEFORE_THE_LIMIT}" not in early.message
        reason = early.message.replace(f"stopped by {_BEFORE_THE_LIMIT}", "it reached its time limit")
        return reason, states.PREEMPTED if in_time else states.TIMEOUT
    return None


def _is_cancelled(job: str, stopped: Sequence[str]) -> bool:
    """Has `scancel` sent the signal? Slurm would put such a job back all the same.

    Slurm then has ended the job and names no reason in its log, as it does for requeues, preemption, limits and nodes. A job that
    is still running was signalled by the time limit or has a grace time.
    """
    try:
        state = commands.queue([job]).get(job, ("", ""))[0]
    except RunError:
        return False
    return state in ("COMPLETING", "CANCELLED") and bool(stopped) and not any(stopped)


def _cancelled(folder: Path, reason: str) -> int:
    conclude(folder, states.CANCELLED, f"cancelled: {reason}")
    return PREEMPTED_CODE


def _go_on(point: Point, reason: str, state: str) -> int:
    """Once more, from the newest checkpoint; where that was too often or is not possible the point ends in this state."""
    folder, before = point.folder, read_state(point.folder)
    if before.requeues >= max_requeues(point):
        conclude(folder, state, f"{reason}; max_requeues is {max_requeues(point)}")
        return PREEMPTED_CODE
    reason_now = f"{reason}; put back into the queue"
    write_state(folder, replace(before, state=states.PENDING, reason=reason_now, ended=time.time()))
    try:
        commands.requeue(before.job)
    except RunError as error:
        if not _is_back(before.job, str(error)):
            conclude(folder, state, f"{reason}; it could not be put back into the queue: {error}")
    return PREEMPTED_CODE


def _is_back(job: str, refusal: str) -> bool:
    """Has somebody else put the job back, e.g. the `scontrol requeue` whose signal stopped the ranks? Slurm wants it once."""
    if any(word in refusal.lower() for word in ("already", "completing", "pending")):
        return True
    try:
        return commands.queue([job]).get(job, ("", ""))[0] in ("PENDING", "REQUEUED", "CONFIGURING")
    except RunError:
        return False


def max_requeues(point: Point) -> int:
    """How often the point may be put back into the queue."""
    return int(point.launcher.get("max_requeues", SlurmSettings.max_requeues))


def with_step(folder: Path, text: str) -> str:
    """The text with the step that the run had reached, where it is known."""
    status = read_json(folder / "status.json") or {}
    return f"{text} at step {status['step']}" if "step" in status else text


def _point(folder: Path) -> Point:
    point = read_point(folder)
    if point is None:
        raise RunError(f"{folder} holds no point.json: it was not prepared by a sweep")
    return point


def batch_log_tail(folder: Path) -> str:
    """The end of the batch job's own log, where `srun` and Slurm say what happened; only of this attempt."""
    path = folder / BATCH_LOG
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            text = file.read().decode("utf-8", errors="replace")
    except OSError:
        return ""
    return text[text.rfind("=== point ") :] if "=== point " in text else text
