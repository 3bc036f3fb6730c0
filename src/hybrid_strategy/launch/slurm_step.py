"""`python -m hybrid_strategy.launch.slurm_step <run folder> srun ...`: waits for the step, but not for a node that is gone.

Where a rank has failed `srun` ends the others. Those of a node that was reset, and is back before Slurm has noticed, it waits for
until the time limit. What the ranks left behind tells the rest (`cli/point.py end`).
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from hybrid_strategy.launch.failures import has_failed

_PATIENCE_SECONDS = 90.0
"""From the first failure on; Slurm kills what does not end after 30 s (`KillWait`)."""

_POLL_SECONDS = 2.0


def wait(process: subprocess.Popen[bytes], run_dir: Path) -> int:
    """The exit code of the step, as a shell has it."""
    failed_at: float | None = None
    while True:
        with suppress(subprocess.TimeoutExpired):  # it still runs: what have its ranks left?
            code = process.wait(_POLL_SECONDS)
            return code if code >= 0 else 128 - code
        if failed_at is None and has_failed(run_dir / "logs"):
            failed_at = time.monotonic()
        if failed_at is not None and time.monotonic() - failed_at > _PATIENCE_SECONDS:
            sys.stdout.write(f"=== srun still waits {_PATIENCE_SECONDS:g} s after a rank has failed: it is ended\n")
            sys.stdout.flush()
            process.kill()


def main() -> int:
    """Signals are for the ranks, who hear them from Slurm; a handler, not `ignore`, which `srun` would inherit."""
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda *_: None)
    return wait(subprocess.Popen(sys.argv[2:]), Path(sys.argv[1]))


if __name__ == "__main__":
    sys.exit(main())
