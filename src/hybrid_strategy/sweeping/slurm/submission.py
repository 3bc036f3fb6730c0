"""Submitting points: one job each, or one array for those that need the same; never more at once than allowed."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hybrid_strategy.files import write_text
from hybrid_strategy.sweeping import states
from hybrid_strategy.sweeping.attempts import read_state, write_state
from hybrid_strategy.sweeping.points import Point
from hybrid_strategy.sweeping.settings import SlurmSettings, settings_of
from hybrid_strategy.sweeping.slurm import commands
from hybrid_strategy.sweeping.slurm.script import SCRIPT_FILE, header, script_of, word

ARRAYS = ".slurm"
"""Folder of a sweep that holds the scripts of its arrays."""


@dataclass(frozen=True)
class Submission:
    """What is submitted, and how. `alive`: jobs of this sweep that wait or run already and count among those at once."""

    settings: SlurmSettings
    sweep: Path
    target: str
    alive: tuple[str, ...] = ()

    def scripts(self, points: Sequence[Point]) -> list[tuple[Point, str]]:
        """The script of each point; nothing is written."""
        return [(point, script_of(point, self.of(point), self.sweep.name, self.target)) for point in points]

    def of(self, point: Point) -> SlurmSettings:
        """The settings resolved for this point."""
        return settings_of(SlurmSettings, point.launcher, "hydra.launcher")

    def submit(self, points: Sequence[Point]) -> None:
        """Writes all scripts, then submits them; each point's state holds its job.

        Raises:
            RunError: Slurm refuses one; the ones before it are submitted.
        """
        for point, text in self.scripts(points):
            write_text(point.folder / SCRIPT_FILE, text)
        groups = self._groups(points)
        lane = self.settings.max_parallel
        if lane and (
            self.alive or len(groups) > 1
        ):  # the limit holds over arrays of different shapes only if each job waits for another
            self._in_lanes(points, lane)
            return
        for number, group in enumerate(groups):
            if len(group) > 1 and self.settings.array:
                self._array(group, number)
            elif lane:
                self._in_lanes(group, lane)
            else:
                self._one(group)

    def _groups(self, points: Sequence[Point]) -> list[list[Point]]:
        """Points that ask for the same, together; an array has one header for all."""
        groups: dict[tuple[str, ...], list[Point]] = {}
        for point in points:
            alike = [line for line in header(point, self.of(point), "", Path("x")) if "--job-name" not in line]
            groups.setdefault(tuple(alike), []).append(point)
        return list(groups.values())

    def _one(self, points: Sequence[Point]) -> None:
        for point in points:
            _submitted(point, commands.submit(point.folder / SCRIPT_FILE))

    def _in_lanes(self, points: Sequence[Point], lanes: int) -> None:
        """Job n starts when job n - lanes has ended: so many at once, whatever their shapes, and without this command.

        Those that are alive end in any order, so that all before that one must have ended.
        """
        jobs = list(self.alive)
        for index, point in enumerate(points, len(jobs)):
            own, last = self.of(point).sbatch.get("dependency"), index - lanes
            before = jobs[: last + 1] if last < len(self.alive) else [jobs[last]]
            after = [own, f"afterany:{':'.join(before)}"] if last >= 0 else []
            option = [f"--dependency={','.join(str(each) for each in after if each)}"] if after else []
            jobs.append(commands.submit(point.folder / SCRIPT_FILE, option))
            _submitted(point, jobs[-1])

    def _array(self, points: Sequence[Point], number: int) -> None:
        folder = self.sweep / ARRAYS
        script, listed = folder / f"array{number}.sh", folder / f"array{number}.txt"
        write_text(listed, "".join(f"{point.folder}\n" for point in points))
        lines = header(points[0], self.of(points[0]), self.sweep.name, folder / f"array{number}")
        named = [f"#SBATCH --job-name={word('job-name', self.sweep.name)}" if "--job-name" in line else line for line in lines]
        limit = f"%{self.settings.max_parallel}" if self.settings.max_parallel else ""
        text = [
            "#!/bin/bash",
            f"# {len(points)} points that need the same; each runs its own script, which can be submitted alone, too",
            *[line for line in named if "--output=" not in line],
            "#SBATCH --output=/dev/null",
            f"#SBATCH --array=0-{len(points) - 1}{limit}",
            f"mapfile -t POINTS < {shlex.quote(str(listed))}",
            "RUN=${POINTS[$SLURM_ARRAY_TASK_ID]}",
            'exec bash "$RUN/slurm/job.sh" >> "$RUN/slurm/batch.log" 2>&1',
        ]
        write_text(script, "\n".join(text) + "\n")
        job = commands.submit(script)
        for index, point in enumerate(points):
            _submitted(point, f"{job}_{index}")


def _submitted(point: Point, job: str) -> None:
    before = read_state(point.folder)
    write_state(point.folder, replace(before, state=states.PENDING, reason="", job=job, requeues=0))
