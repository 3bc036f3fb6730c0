"""Puts a Slurm job back into the queue. No torch: batch scripts use it too."""

from __future__ import annotations

import os
import subprocess


def slurm_job_id() -> str:
    """The job that this process belongs to, as `scontrol requeue` wants it: a task of an array by both numbers; empty: none."""
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else os.environ.get("SLURM_JOB_ID", "")


def requeue() -> str:
    """Puts this job back; to be called by one process, once.

    Slurm ends the whole step as soon as it has the request: `scontrol` has a session of its own, so that it lives to answer.

    Returns:
        Why it could not be done; empty where it was.
    """
    command = ["scontrol", "requeue", slurm_job_id()]
    try:
        done = subprocess.run(command, capture_output=True, text=True, start_new_session=True, check=False)
    except OSError as error:
        return f"{' '.join(command)}: {error}"
    return "" if done.returncode == 0 else f"{' '.join(command)}: {done.stderr.strip() or f'exit code {done.returncode}'}"
