"""The ranks that save or load together: an error on one becomes the same `CheckpointError` on all, so none waits for ever."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar, cast

import torch.distributed as dist

from hybrid_strategy.errors import CheckpointError, message

T = TypeVar("T")


class Work(NamedTuple):
    """What is being done, for the error's text: `checkpoint is '<path>': <rank 1> could not <verb> it. ... <advice>.`"""

    path: str
    verb: str
    advice: str = ""


class _Outcome(NamedTuple):
    value: Any
    error: str | None
    clear: bool  # the text is a CheckpointError's own


@dataclass(frozen=True)
class Ranks:
    """The processes of one group; without torch.distributed, this process alone.

    Attributes:
        group: None is the default group, or no group at all when `size` is 1.
    """

    group: dist.ProcessGroup | None
    rank: int
    size: int

    @staticmethod
    def of(process_group: dist.ProcessGroup | None) -> Ranks:
        """The ranks of `process_group`; None is the default group, or one process when there is none."""
        if not (dist.is_available() and dist.is_initialized()):
            return Ranks(None, 0, 1)
        return Ranks(process_group, dist.get_rank(process_group), dist.get_world_size(process_group))

    def arrive(self, work: Work, seconds: float) -> None:
        """Waits until all ranks are here, on gloo; names those that are not after `seconds`.

        Raises:
            CheckpointError: a rank did not come, e.g. because saving was called on rank 0 only.
        """
        if self.size == 1 or dist.get_backend(self.group) != "gloo":
            return
        try:
            dist.monitored_barrier(self.group, timeout=timedelta(seconds=seconds), wait_all_ranks=self.rank == 0)
        except RuntimeError as error:
            rule = f"not all ranks came to {work.verb} it within {seconds:g} s"
            advice = "Call it on every rank, never inside a rank-zero block"
            raise CheckpointError(message("checkpoint", work.path, rule, str(error).splitlines()[0], advice)) from error

    def collect(self, work: Work, function: Callable[[], T]) -> list[T] | None:
        """Runs `function` on every rank; rank 0 gets all results in order of rank, the others None.

        Raises:
            CheckpointError: it failed on one rank; raised on all with the rank and the cause.
        """
        outcome, cause = _attempt(function)
        gathered = self._gather(work, outcome)
        text = _failure_text(work, gathered) if gathered is not None else None
        text = self._broadcast(work, text)
        if text is not None:
            raise CheckpointError(text) from cause
        return [cast(T, each.value) for each in gathered] if gathered is not None else None

    def lead(self, work: Work, function: Callable[[], T]) -> T:
        """Runs `function` on rank 0 and gives its result to all.

        Raises:
            CheckpointError: it failed; raised on all.
        """
        outcome, cause = _attempt(function) if self.rank == 0 else (None, None)
        done = cast(_Outcome, self._broadcast(work, outcome))
        if done.error is not None:
            raise CheckpointError(done.error if done.clear else _text(work, "rank 0", done.error)) from cause
        return cast(T, done.value)

    def scatter(self, work: Work, values: list[T] | None) -> T:
        """Gives `values[r]` of rank 0 to rank r."""
        if self.size == 1:
            return cast(list[T], values)[0]
        mine: list[Any] = [None]
        self._guard(work, lambda: dist.scatter_object_list(mine, cast(Any, values), group=self.group, group_src=0))
        return cast(T, mine[0])

    def _gather(self, work: Work, value: _Outcome) -> list[_Outcome] | None:
        if self.size == 1:
            return [value]
        into: list[Any] | None = [None] * self.size if self.rank == 0 else None
        self._guard(work, lambda: dist.gather_object(value, into, group=self.group, group_dst=0))
        return into

    def _broadcast(self, work: Work, value: Any) -> Any:
        if self.size == 1:
            return value
        holder = [value]
        self._guard(work, lambda: dist.broadcast_object_list(holder, group=self.group, group_src=0))
        return holder[0]

    def _guard(self, work: Work, collective: Callable[[], Any]) -> None:
        """A collective fails when a peer has died or waits too long: that too is a checkpoint's failure, with its name."""
        try:
            collective()
        except RuntimeError as error:
            text = _text(work._replace(advice="Look for the rank that ended first"), "the group of ranks", str(error))
            raise CheckpointError(text) from error


def _attempt(function: Callable[[], Any]) -> tuple[_Outcome, Exception | None]:
    try:
        return _Outcome(function(), None, False), None
    except CheckpointError as error:
        return _Outcome(None, str(error), True), error
    except Exception as error:
        return _Outcome(None, f"{type(error).__name__}: {error}", False), error


def _failure_text(work: Work, outcomes: list[_Outcome]) -> str | None:
    """The text all ranks raise: a clear error shared by all as it is, else the ranks and their causes."""
    failed = [(rank, each) for rank, each in enumerate(outcomes) if each.error is not None]
    if not failed:
        return None
    texts = list(dict.fromkeys(each.error for _, each in failed))
    if len(texts) == 1 and len(failed) == len(outcomes) and failed[0][1].clear:
        return texts[0]
    by_text = {text: [rank for rank, each in failed if each.error == text] for text in texts}
    who = f"{'rank' if len(failed) == 1 else 'ranks'} {', '.join(str(rank) for rank, _ in failed)}"
    if len(by_text) == 1:
        return _text(work, who, str(texts[0]))
    return _text(work, who, "; ".join(f"rank {', '.join(map(str, ranks))}: {text}" for text, ranks in by_text.items()))


def _text(work: Work, who: str, cause: str) -> str:
    return message("checkpoint", work.path, f"{who} could not {work.verb} it", cause, work.advice)
