"""What went wrong in a rank: written by the rank, read by the parent, so that the user sees the first cause."""

from __future__ import annotations

import json
import signal
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path

from hybrid_strategy.errors import HybridError, PreemptedError, RunError
from hybrid_strategy.launch.job import error_path, log_path

# What a rank reports when the failure was another's: its peer is gone. Only shown when no rank reports anything else.
_CONSEQUENCES = ("connection closed by peer", "connection reset by peer", "connection refused", "broken pipe", "socket closed")
_TAIL_LINES = 20


@dataclass(frozen=True)
class Failure:
    """One rank's failure. `refusal`: raised on purpose, so that its message says all and no traceback is shown."""

    rank: int
    time_seconds: float
    message: str
    traceback: str
    exit_code: int = 1
    refusal: bool = False

    @property
    def is_consequence(self) -> bool:
        """Is this what a rank sees when one of its peers has died?"""
        return any(words in self.message.lower() for words in _CONSEQUENCES)


class WorkerFailedError(RunError):
    """A rank failed. The text is what the user should read; `exit_code` is what the command ends with."""

    def __init__(self, text: str, exit_code: int = 1) -> None:
        super().__init__(text)
        self.exit_code = exit_code


def record(log_dir: Path, rank: int, error: BaseException) -> Failure:
    """Writes the failure of this rank where the parent looks for it."""
    frames = error.__traceback__
    failure = Failure(
        rank=rank,
        time_seconds=time.time(),
        message=str(error) or type(error).__name__,
        traceback="".join(traceback.format_exception(type(error), error, frames.tb_next if frames else None)),
        exit_code=getattr(error, "exit_code", 1),
        refusal=isinstance(error, HybridError),
    )
    error_path(log_dir, rank).write_text(json.dumps(asdict(failure)), encoding="utf-8")
    return failure


def first_failure(log_dir: Path, world_size: int) -> Failure | None:
    """The earliest recorded failure that is not merely the loss of a peer, else the earliest."""
    found = []
    for rank in range(world_size):
        path = error_path(log_dir, rank)
        if path.exists():
            found.append(Failure(**json.loads(path.read_text(encoding="utf-8"))))
    found.sort(key=lambda each: (each.is_consequence, each.time_seconds))
    return found[0] if found else None


def has_failed(log_dir: Path) -> bool:
    """Has a rank left a record of more than a signal? One that is being written counts the next time."""
    for path in log_dir.glob("rank*.error.json"):
        try:
            code = json.loads(path.read_text(encoding="utf-8"))["exit_code"]
        except (OSError, ValueError, KeyError):
            continue
        if code != PreemptedError.exit_code:
            return True
    return False


def explain(log_dir: Path, world_size: int, exit_codes: dict[int, int]) -> WorkerFailedError:
    """The error for the user.

    Args:
        log_dir: where the ranks left their logs and failures.
        world_size: number of ranks.
        exit_codes: of the ranks that had failed before the others were stopped; negative where a signal ended them.
    """
    failure = first_failure(log_dir, world_size)
    # A rank that died without a word (killed, crashed in native code) is the cause of the words of its peers.
    silent = [rank for rank in sorted(exit_codes) if not error_path(log_dir, rank).exists()]
    if silent and (failure is None or failure.is_consequence):
        return _died_silently(log_dir, silent[0], exit_codes[silent[0]])
    if failure is None:
        return WorkerFailedError(f"the run failed without a traceback; logs: {log_dir}")
    where = f"rank {failure.rank} failed; log: {log_path(log_dir, failure.rank)}"
    text = failure.message if failure.refusal else failure.traceback.rstrip()
    return WorkerFailedError(f"{text}\n{where}", failure.exit_code)


def raise_if_stopped(log_dir: Path, world_size: int, signal_number: int, exit_codes: dict[int, int]) -> None:
    """Raises PreemptedError where the ranks left on request, KeyboardInterrupt where Ctrl-C came before they trained.

    Args:
        signal_number: what asked the launcher; 0 where it was not asked: a rank may be told directly.
        exit_codes: as for `explain`.
    """
    failure = first_failure(log_dir, world_size)
    if failure is not None and failure.exit_code == PreemptedError.exit_code:
        raise PreemptedError(failure.message)
    asked = signal_number and failure is None and exit_codes
    if asked and all(code in (-signal_number, -signal.SIGTERM, 130) for code in exit_codes.values()):
        if signal_number == signal.SIGINT:
            raise KeyboardInterrupt
        raise PreemptedError(f"stopped by {signal.Signals(signal_number).name} before training began")


def _died_silently(log_dir: Path, rank: int, exit_code: int) -> WorkerFailedError:
    how = f"ended by {signal.Signals(-exit_code).name}" if exit_code < 0 else f"ended with exit code {exit_code}"
    if exit_code == -signal.SIGKILL:
        how += " (often: out of memory)"
    path = log_path(log_dir, rank)
    tail = path.read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL_LINES:] if path.exists() else []
    return WorkerFailedError("\n".join([*tail, f"rank {rank} {how} without a traceback; log: {path}"]))
