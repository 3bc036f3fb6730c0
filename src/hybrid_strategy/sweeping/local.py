"""Runs points on this machine: each in a process tree of its own, with nothing of one left for the next."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import IO, Any

from hybrid_strategy.config.storage import PREEMPTED_FILE
from hybrid_strategy.config.world import visible_gpus
from hybrid_strategy.errors import ConfigError, message
from hybrid_strategy.files import read_json
from hybrid_strategy.launch.parent_death import PARENT_VARIABLE
from hybrid_strategy.sweeping import states
from hybrid_strategy.sweeping.attempts import State, begin, conclude, read_state, write_state
from hybrid_strategy.sweeping.causes import PREEMPTED_CODE, Cause, cause_of
from hybrid_strategy.sweeping.points import Point
from hybrid_strategy.sweeping.settings import OF_A_RANK, LocalSettings, seconds_of, settings_of
from hybrid_strategy.sweeping.slurm.watching import Watcher
from hybrid_strategy.units import format_seconds

OUTPUT_FILE = "output.log"
"""What the point would have shown on a terminal."""

_GRACE_SECONDS = 8.0
"""From the request to end until the processes are killed: what they need to save the step they are in."""


@dataclass
class _Running:
    point: Point
    process: subprocess.Popen[bytes]
    output: IO[bytes]
    limit: float | None
    deadline: float
    gpus: tuple[str, ...]
    stopping: float | None = None
    ended_by: str = ""


def local_settings(values: Mapping[str, Any]) -> LocalSettings:
    """The settings of a sweep, or of one of its points.

    Raises:
        ConfigError: one of them is wrong.
    """
    made = settings_of(LocalSettings, values, "hydra.launcher")
    seconds_of(made.time, "hydra.launcher.time")
    return made


@dataclass
class LocalRunner:
    """Starts points while there is room, and looks after them.

    Attributes:
        entry: the command that runs a prepared point, without its folder.
        settings: of the sweep; a point has its own limit and variables.
    """

    settings: LocalSettings
    entry: tuple[str, ...]
    _running: list[_Running] = field(default_factory=list)

    def run(self, points: Sequence[Point], tick: Callable[[], None]) -> None:
        """Returns when all have ended; `tick` is called again and again meanwhile.

        Raises:
            KeyboardInterrupt: stopped from the terminal; nothing is left running.
        """
        waiting = list(points)
        free = _gpu_names()
        with _as_ctrl_c():
            try:
                while waiting or self._running:
                    while waiting and self._room(waiting[0], free):
                        self._start(waiting.pop(0), free)
                    for each in list(self._running):
                        if self._look(each):
                            self._running.remove(each)
                            free.extend(each.gpus)
                    tick()
                    time.sleep(self.settings.poll_seconds)
            finally:
                self._stop_all()

    def alive(self, point: Point) -> bool:
        """Whatever ran here ended with the command that ran it.

        Raises:
            ConfigError: Slurm has a job of this point.
        """
        state = read_state(point.folder)
        if (
            state.job
            and state.state not in states.ENDED
            and shutil.which("squeue")
            and Watcher(patience_seconds=0.0).look([point])
        ):
            rule, numbers = "a job of Slurm that waits or runs has the point's folder", f"{point.name} is job {state.job}"
            advice = f"Set slurm, or end the jobs with `hybrid sweep cancel {point.folder.parent}`"
            raise ConfigError(message("hydra/launcher", "local", rule, numbers, advice))
        return False

    def _room(self, point: Point, free: Sequence[str]) -> bool:
        needed, most = point.resources.world_size, self.settings.max_parallel
        if not self._running:
            return True
        if most is not None and len(self._running) >= most:
            return False
        if point.resources.gpus:
            return len(free) >= needed
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        busy = sum(each.point.resources.world_size for each in self._running)
        return most is not None and busy + needed <= cores

    def _start(self, point: Point, free: list[str]) -> None:
        needed = point.resources.world_size if point.resources.gpus else 0
        gpus = tuple(free[:needed])
        del free[:needed]
        settings = local_settings(point.launcher) if point.launcher else self.settings
        limit = seconds_of(settings.time, "hydra.launcher.time")
        begin(point.folder)
        output = (point.folder / OUTPUT_FILE).open("ab")
        process = subprocess.Popen(
            [*self.entry, "run", str(point.folder)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=_environment(settings.environment, gpus),
            start_new_session=True,
        )
        self._running.append(_Running(point, process, output, limit, time.monotonic() + (limit or float("inf")), gpus))

    def _look(self, running: _Running) -> bool:
        """Has it ended? Then its result is written; what is over its time is told to end, then made to."""
        code = running.process.poll()
        if code is not None:
            running.output.close()
            _conclude(running.point, code, running.ended_by)
            return True
        now = time.monotonic()
        if running.stopping is None and now > running.deadline:
            running.ended_by = f"it did not end within {format_seconds(running.limit or 0.0)}"
            running.stopping = now
            running.process.send_signal(signal.SIGTERM)
        elif running.stopping is not None and now > running.stopping + _GRACE_SECONDS:
            _kill(running.process)
        return False

    def _stop_all(self) -> None:
        """After Ctrl-C or an error: every tree ends; its point is as if it had not been started, and can go on.

        A second Ctrl-C waits for no checkpoint.
        """
        for each in self._running:
            each.process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + _GRACE_SECONDS
        for each in self._running:
            try:
                each.process.wait(max(0.0, deadline - time.monotonic()))
            except (subprocess.TimeoutExpired, KeyboardInterrupt):
                deadline = time.monotonic()
                _kill(each.process)
                each.process.wait()
            each.output.close()
            state = read_state(each.point.folder)
            reason = "stopped with the sweep"
            write_state(each.point.folder, replace(state, state=states.PENDING, reason=reason, ended=time.time()))
        self._running.clear()


@contextmanager
def _as_ctrl_c() -> Iterator[None]:
    """A command that is told to end, or whose terminal is closed, ends its points as Ctrl-C does: saved, to go on from there."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    heard = [each for each in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(each) is not signal.SIG_IGN]
    before = {each: signal.signal(each, _interrupt) for each in heard}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt(f"stopped by {signal.Signals(number).name}")


def _conclude(point: Point, code: int, ended_by: str) -> State:
    if code == 0:  # also where it had ended by itself before it heard that its time was up
        return conclude(point.folder, states.OK, "")
    if ended_by:
        return conclude(point.folder, states.TIMEOUT, _at_step(point, ended_by))
    if code == PREEMPTED_CODE or (point.folder / PREEMPTED_FILE).exists():
        return conclude(point.folder, states.PREEMPTED, _at_step(point, "stopped by a signal after a checkpoint was written"))
    cause: Cause = cause_of(point.folder, point.resources.world_size, _said(point), code)
    return conclude(point.folder, cause.state, cause.reason, cause.further())


def _at_step(point: Point, text: str) -> str:
    status = read_json(point.folder / "status.json") or {}
    return f"{text}; step {status['step']}" if "step" in status else text


def _said(point: Point) -> str:
    """The end of what the point printed: a refusal, or the launcher's account of a rank that died without a word."""
    lines = (point.folder / OUTPUT_FILE).read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(lines[-20:])


def _kill(process: subprocess.Popen[bytes]) -> None:
    """The parent of the ranks; they are tied to its life (`launch/parent_death.py`)."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        process.kill()


def _environment(further: Mapping[str, object], gpus: Sequence[str]) -> dict[str, str]:
    """That of the command, without what belongs to a distributed process, tied to the life of this process."""
    kept = {key: value for key, value in os.environ.items() if key not in OF_A_RANK and not key.startswith("TORCHELASTIC_")}
    values = {str(key): str(value) for key, value in {**kept, **further}.items() if value is not None}
    values[PARENT_VARIABLE] = str(os.getpid())
    if gpus:
        values["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    return values


def _gpu_names() -> list[str]:
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = visible_gpus()
    return [each.strip() for each in named.split(",")][:count] if named else [str(index) for index in range(count)]
