"""Runs points as Slurm jobs: submits what is missing, then watches, or leaves it to `hybrid sweep`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hybrid_strategy.errors import ConfigError, RunError
from hybrid_strategy.sweeping import states
from hybrid_strategy.sweeping.attempts import conclude, read_state
from hybrid_strategy.sweeping.points import Point
from hybrid_strategy.sweeping.prepare import Ready
from hybrid_strategy.sweeping.screen import skipped_lines
from hybrid_strategy.sweeping.session import Session
from hybrid_strategy.sweeping.settings import SlurmSettings, settings_of
from hybrid_strategy.sweeping.slurm import commands
from hybrid_strategy.sweeping.slurm.submission import Submission
from hybrid_strategy.sweeping.slurm.watching import Watcher, outage_line

_ENDING_SECONDS = 180.0
"""Longer than Slurm gives a job that it ends (`KillWait`, 30 s) and the clean-up of its nodes."""


@dataclass
class SlurmRunner:
    """Points as jobs."""

    settings: SlurmSettings
    session: Session
    watcher: Watcher = field(default_factory=Watcher)
    _told: bool = False

    def run(self, points: Sequence[Point], tick: Callable[[], None]) -> None:
        """Submits those that are not alive; waits for all unless told not to. Ctrl-C leaves the jobs running."""
        self._let_end(points)
        fresh = [point for point in points if not self.alive(point)]
        self._tell_outage()
        self._submit(fresh, tuple(read_state(point.folder).job for point in points if point not in fresh))
        if not self.settings.wait:
            self.session.detached = bool(points)
            return
        try:
            self._wait(list(points), tick)
        except KeyboardInterrupt:
            self.session.detached = True

    def _let_end(self, points: Sequence[Point]) -> None:
        """A job that was just cancelled has the point's folder until it has saved; then the point can be submitted anew.

        Raises:
            RunError: it does not end.
        """
        deadline, told = time.monotonic() + _ENDING_SECONDS, False
        while ending := [point for point in points if read_state(point.folder).state in states.ENDED and self.alive(point)]:
            names = ", ".join(point.name for point in ending)
            if self.watcher.outage or time.monotonic() > deadline:
                raise RunError(
                    f"{names}: the job before is still ending ({self.watcher.outage or 'squeue shows it'}). Try again."
                )
            if not told:
                text = f"waiting for jobs that are ending: {names}"
                self.session.console.print(text, markup=False, highlight=False, soft_wrap=True)
            told = True
            time.sleep(self.settings.poll_seconds)

    def alive(self, point: Point) -> bool:
        """Does Slurm have a job of this point that waits or runs?"""
        return bool(read_state(point.folder).job) and bool(self.watcher.look([point]))

    def _wait(self, alive: list[Point], tick: Callable[[], None]) -> None:
        while alive:
            alive = self.watcher.look(alive)
            self._tell_outage()
            tick()
            if alive:
                time.sleep(self.settings.poll_seconds)

    def _tell_outage(self) -> None:
        """Once for each time that Slurm stops answering."""
        if self.watcher.outage and not self._told:
            text = f"{outage_line(self.watcher.outage)}; asking again"
            self.session.console.print(text, markup=False, highlight=False, soft_wrap=True)
        self._told = bool(self.watcher.outage)

    def _submit(self, points: Sequence[Point], alive: tuple[str, ...]) -> None:
        assert self.session.folder is not None  # known before anything is run
        try:
            Submission(self.settings, self.session.folder, self.session.target, alive).submit(points)
        except RunError as error:
            left = [point for point in points if not read_state(point.folder).job]
            if len(left) == len(points):
                raise ConfigError(f"Slurm refuses the job, nothing was submitted. {error}") from error
            for point in left:
                conclude(point.folder, states.FAILED, f"it could not be submitted: {error}")


def slurm_runner(settings: Mapping[str, Any], session: Session) -> SlurmRunner:
    """The runner of these settings.

    Raises:
        ConfigError: a setting is wrong, or there is no Slurm here.
    """
    made = settings_of(SlurmSettings, settings, "hydra.launcher")
    if not made.dry_run:
        commands.check_installed()
    return SlurmRunner(made, session)


def show_scripts(settings: Mapping[str, Any], session: Session, ready: Sequence[Ready]) -> bool:
    """Under `dry_run` prints the scripts; else checks that they can be written, before anything is."""
    made = settings_of(SlurmSettings, settings, "hydra.launcher")
    assert session.folder is not None  # known before anything is run
    scripts = Submission(made, session.folder, session.target).scripts([each.point for each in ready])
    if not made.dry_run:
        return False
    for line in skipped_lines(session.skipped):
        session.console.print(f"#{line}", markup=False, highlight=False, soft_wrap=True)
    for point, text in scripts:
        session.console.print(f"# ---- {point.folder / 'slurm/job.sh'}", markup=False, highlight=False, soft_wrap=True)
        session.console.print(text, markup=False, highlight=False, soft_wrap=True)
    return True
