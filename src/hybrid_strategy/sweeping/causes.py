"""Why a point did not end well, from what its processes left behind."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybrid_strategy.launch.failures import Failure, first_failure
from hybrid_strategy.launch.job import error_path, log_path
from hybrid_strategy.sweeping import states

_OUT_OF_MEMORY = re.compile(
    r"out of memory|outofmemory|can'?t allocate memory|cannot allocate memory|not enough memory|std::bad_alloc|\bMemoryError\b"
    r"|oom[- _]?kill|failed to allocate",
    re.IGNORECASE,
)
_TASK = re.compile(r"srun: error: \S+ tasks? ([\d,\- ]+): (.+)$", re.MULTILINE)
_ENDED = re.compile(r"^rank (\d+) (ended .+?) without a traceback", re.MULTILINE)
"""What the local launcher says of a rank that died (`launch/failures.py`)."""

_HINT = " (often: out of memory)"
_ENDED_WITH_THE_STEP = ("Killed", "Terminated", "Cancelled")
_TAIL_LINES = 20
PREEMPTED_CODE = 75


@dataclass(frozen=True)
class Cause:
    """A state with its reason in one line, and the whole text behind it."""

    state: str
    reason: str
    traceback: str = ""
    rank: int | None = None

    def further(self) -> dict[str, Any]:
        """What `result.json` holds beside state and reason."""
        return {"traceback": self.traceback, "rank": self.rank} if self.traceback else {}


def failed_rank(folder: Path, world_size: int) -> Cause | None:
    """The first failure that a rank has recorded, if any has; None where ranks only left because of a signal."""
    failure = first_failure(folder / "logs", world_size)
    if failure is None or failure.exit_code == PREEMPTED_CODE:
        return None
    return _of_failure(failure)


def consequence_only(folder: Path, world_size: int) -> bool:
    """Has no rank recorded more than the loss of a peer? The cause may come yet."""
    failure = first_failure(folder / "logs", world_size)
    return failure is not None and failure.is_consequence


def lost_a_node(folder: Path, world_size: int, said: str) -> bool:
    """Have ranks only lost their peers, while one of them has left no record and `srun` has seen nothing of its end?"""
    if not consequence_only(folder, world_size):
        return False
    seen = {rank for ranks, _ in _TASK.findall(said) for rank in _ranks(ranks)}
    return any(rank not in seen and not error_path(folder / "logs", rank).exists() for rank in range(world_size))


def cause_of(folder: Path, world_size: int, said: str = "", exit_code: int = 1) -> Cause:
    """The cause of an attempt that ended badly.

    Args:
        said: what the parent of the ranks said last: the launcher's error, or the log of the batch job.
        exit_code: of that parent.
    """
    failure = first_failure(folder / "logs", world_size)
    died = _silent(folder, _TASK.findall(said) or _ENDED.findall(said))
    if died and (failure is None or failure.is_consequence):
        return _of_silent(folder, died)
    if failure is not None:
        return _of_failure(failure)
    text = said.strip() or _tail(log_path(folder / "logs", 0))
    last = (text.splitlines() or ["it left no word"])[-1]
    state = states.OOM if _OUT_OF_MEMORY.search(text) else states.FAILED
    return Cause(state, f"ended with exit code {exit_code}: {last}"[:400], text)


def _of_failure(failure: Failure) -> Cause:
    text = failure.message if failure.refusal else failure.traceback.rstrip()
    line = " ".join(failure.message.split()) or text.splitlines()[-1]
    kind = text.splitlines()[-1].partition(":")[0].strip() if not failure.refusal and text else ""
    if kind and not line.startswith(kind) and re.fullmatch(r"[\w.]+", kind):
        line = f"{kind.rpartition('.')[2]}: {line}"
    state = states.OOM if _OUT_OF_MEMORY.search(f"{kind} {failure.message}") else states.FAILED
    return Cause(state, f"rank {failure.rank}: {line}"[:400], text, failure.rank)


def _silent(folder: Path, said: list[tuple[str, str]]) -> list[tuple[int, str]]:
    """Ranks that were seen dying, without those that left a traceback; what was ended with the step comes last."""
    found = [(rank, how.strip()) for ranks, how in said for rank in _ranks(ranks)]
    silent = [(rank, how) for rank, how in found if not error_path(folder / "logs", rank).exists()]
    return sorted(silent, key=lambda each: each[1].startswith(_ENDED_WITH_THE_STEP))


def _ranks(text: str) -> list[int]:
    """`0-1,3` as Slurm writes it."""
    ranks: list[int] = []
    for part in text.replace(" ", "").split(","):
        first, _, last = part.partition("-")
        ranks += range(int(first), int(last or first) + 1)
    return ranks


def _of_silent(folder: Path, died: list[tuple[int, str]]) -> Cause:
    """A rank that was seen dying without a traceback; what others say is the consequence."""
    rank, how = died[0]
    state = states.OOM if _OUT_OF_MEMORY.search(how.replace(_HINT, "")) else states.FAILED
    return Cause(state, f"rank {rank}: {how}", _tail(log_path(folder / "logs", rank)) or how, rank)


def _tail(path: Path) -> str:
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    return "\n".join(lines[-_TAIL_LINES:])
