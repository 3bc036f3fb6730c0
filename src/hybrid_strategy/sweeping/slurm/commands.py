"""Slurm's commands, called without a shell."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from hybrid_strategy.errors import ConfigError, RunError, message

_PATIENCE_SECONDS = 60.0


def check_installed() -> None:
    """Refuse before anything is written where there is no Slurm.

    Raises:
        ConfigError: `sbatch` is not found.
    """
    if shutil.which("sbatch") is None:
        rule = "sbatch is not on PATH here"
        raise ConfigError(message("hydra/launcher", "slurm", rule, "", "Set local, or use a login node of the cluster"))


def call(*command: str, own_session: bool = False) -> str:
    """The output of a command.

    Args:
        own_session: not reached by signals that Slurm sends to the step that calls.

    Raises:
        RunError: it failed, does not exist or does not answer.
    """
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_PATIENCE_SECONDS, start_new_session=own_session, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RunError(f"{command[0]}: {error}") from error
    if done.returncode:
        raise RunError(f"{' '.join(command)}: {(done.stderr or done.stdout).strip() or f'exit code {done.returncode}'}")
    return done.stdout


def submit(script: Path, options: Sequence[str] = ()) -> str:
    """Hands a script to Slurm; returns the job's number."""
    return call("sbatch", "--parsable", *options, str(script)).strip().split(";")[0]


def requeue(job: str) -> None:
    """Puts a running job back into the queue."""
    call("scontrol", "requeue", job, own_session=True)


def cancel(jobs: Sequence[str]) -> None:
    """Ends jobs, waiting or running."""
    if jobs:
        call("scancel", *jobs)


def queue(jobs: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Job -> state and reason, of those that Slurm's controller still knows; tasks of arrays by both numbers."""
    if not jobs:
        return {}
    numbers = sorted({job.partition("_")[0] for job in jobs})
    try:
        lines = call("squeue", "--noheader", "--array", "--states=all", f"--jobs={','.join(numbers)}", "--format=%i|%T|%r")
    except RunError as error:
        if "Invalid job id" in str(error):  # all of them are gone
            return {}
        raise
    found = {}
    for line in lines.splitlines():
        job, _, rest = line.strip().partition("|")
        state, _, reason = rest.partition("|")
        found[job] = (state, reason)
    for job in jobs:
        whole = job.partition("_")[0]
        if job not in found and whole in found:  # an array that was cancelled before a task began
            found[job] = found[whole]
    return {job: found[job] for job in jobs if job in found}


def ended_as(job: str) -> str:
    """The state in which accounting remembers a job; empty where nothing does."""
    try:
        lines = call("sacct", "--noheader", "--parsable2", "--allocations", f"--jobs={job}", "--format=State").split("\n")
    except RunError:
        return ""
    return lines[0].split(" ")[0].strip() if lines else ""
