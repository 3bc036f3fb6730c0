"""`python -m hybrid_strategy.launch.slurm_step <run folder> srun ...`: waits for the step, no longer than it makes sense.

Where a rank has failed `srun` asks the others to end and kills them after `KillWait` (30 s); one that waits for others to come
does not hear it. Those of a node that was reset, and is back before Slurm has noticed, it waits for until the time limit. What
the ranks left behind tells the rest (`cli/point.py end`).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from hybrid_strategy.errors import PreemptedError

_SHUTDOWN_SECONDS = 3.0
"""How long ranks may take to leave after the first failure, as on one machine."""

_PATIENCE_SECONDS = 90.0
"""How long `srun` may take to end, from the first failure on."""

_POLL_SECONDS = 1.0


def wait(process: subprocess.Popen[bytes], run_dir: Path) -> int:
    """The exit code of the step, as a shell has it."""
    failed_at: float | None = None
    told = False
    while True:
        try:
            code = process.wait(_POLL_SECONDS)
            return code if code >= 0 else 128 - code
        except subprocess.TimeoutExpired:
            pass
        if failed_at is None:
            failed_at = time.monotonic() if _has_failed(run_dir) else None
            continue
        seconds = time.monotonic() - failed_at
        if seconds > _SHUTDOWN_SECONDS and not told:
            told = True
            kill_step(os.environ.get("SLURM_JOB_ID", ""))
        if seconds > _PATIENCE_SECONDS:
            sys.stdout.write(f"=== srun still waits {_PATIENCE_SECONDS:g} s after a rank has failed: it is ended\n")
            sys.stdout.flush()
            process.kill()


def kill_step(job: str) -> None:
    """Kills what is left of the job's steps, on all nodes; the batch script goes on."""
    subprocess.run(["scancel", "--signal=KILL", job], capture_output=True, check=False)


def _has_failed(run_dir: Path) -> bool:
    """Has a rank left a record of more than a signal? A file that is being written counts the next time."""
    for path in (run_dir / "logs").glob("rank*.error.json"):
        try:
            code = json.loads(path.read_text(encoding="utf-8"))["exit_code"]
        except (OSError, ValueError, KeyError):
            continue
        if code != PreemptedError.exit_code:
            return True
    return False


def main() -> int:
    """Signals are for the ranks, who hear them from Slurm; a handler, not `ignore`, which `srun` would inherit."""
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda *_: None)
    return wait(subprocess.Popen(sys.argv[2:]), Path(sys.argv[1]))


if __name__ == "__main__":
    sys.exit(main())
