"""What a launcher is asked to run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

LISTEN_VARIABLE = "HYBRID_STRATEGY_LISTENS"
"""Set for ranks that look for a request to stop by themselves."""


@dataclass(frozen=True)
class Job:
    """One function in `world_size` fresh processes of this machine.

    Attributes:
        target: `package.module:function`; every rank calls `function(run_dir)`.
        run_dir: the run folder; ranks write `logs/rank<r>.log` and, when they fail, `logs/rank<r>.error.json` into it.
        environment: variables set for the ranks only.
        stops_itself: the target looks for a request to stop (`checkpoint/stop_request.py`): signals are passed on to it, and
            it is given the time it needs to save and leave.
    """

    target: str
    run_dir: Path
    world_size: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)
    stops_itself: bool = False

    @property
    def log_dir(self) -> Path:
        return self.run_dir / "logs"


class Launcher(Protocol):
    """Starts the processes of a job and waits for them; one file a launcher in `launch/launchers`."""

    name: str

    def run(self, job: Job) -> None:
        """Returns when every rank has ended well.

        Raises:
            WorkerFailedError: a rank failed; carries the first failure.
            PreemptedError: the ranks left because a signal asked them to.
            KeyboardInterrupt: stopped from the terminal; no process is left.
        """


def log_path(log_dir: Path, rank: int) -> Path:
    """Where the output of a rank goes."""
    return log_dir / f"rank{rank}.log"


def error_path(log_dir: Path, rank: int) -> Path:
    """Where a failing rank leaves its traceback."""
    return log_dir / f"rank{rank}.error.json"
