"""Saves while training goes on: the blocks are copied to host memory, a thread writes them and agrees with the other ranks.

The ranks plan in the calling thread; the writing thread speaks over a gloo group of its own, so its messages never mix with those
of training. The thread is no daemon: a process that ends without `close` still finishes the last save, as long as it has not
destroyed its process groups.
"""

from __future__ import annotations

import contextlib
import os
import threading
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from hybrid_strategy.checkpoint.agreement import Ranks, Work
from hybrid_strategy.checkpoint.content import CheckpointContent
from hybrid_strategy.checkpoint.saving import PreparedSave, SaveOptions, SaveReport
from hybrid_strategy.errors import CheckpointError, ConfigError, did_you_mean, message
from hybrid_strategy.planning.refusals import CHECKPOINT_WHEN_BUSY

_NICENESS = 10
_TIMEOUT = timedelta(hours=12)  # a rank that died is noticed at once; this bounds only how unevenly the ranks may write


@dataclass
class _Running:
    thread: threading.Thread
    report: SaveReport | None = None
    error: BaseException | None = None


class AsyncSaver:
    """Writes checkpoints in the background, one at a time. Making one is collective.

    Host memory: the blocks this rank writes, once (`staged_bytes`), kept between saves and used again.

    Args:
        process_group: the ranks that save together; None is the default group.
        when_busy: what a save does that comes before the last one is finished: `wait` for it, or `skip` itself.

    Raises:
        ConfigError: `when_busy` is neither.
    """

    def __init__(self, process_group: ProcessGroup | None = None, when_busy: str = "wait") -> None:
        if when_busy not in CHECKPOINT_WHEN_BUSY:
            raise ConfigError(
                message("when_busy", when_busy, "there is no such way", "", did_you_mean(when_busy, CHECKPOINT_WHEN_BUSY))
            )
        self.when_busy = when_busy
        self.ranks = Ranks.of(process_group)
        self._writers = _writer_ranks(self.ranks)
        self._running: _Running | None = None
        self._buffers: dict[str, Tensor] = {}

    @property
    def busy(self) -> bool:
        """A save of this rank is still being written."""
        return self._running is not None and self._running.thread.is_alive()

    @property
    def failed(self) -> bool:
        """The last save of this rank has ended with an error, which `wait` will raise."""
        return self._running is not None and not self._running.thread.is_alive() and self._running.error is not None

    @property
    def staged_bytes(self) -> int:
        """Host memory held for copies."""
        return sum(each.numel() * each.element_size() for each in self._buffers.values())

    def save(self, path: str | os.PathLike[str], content: CheckpointContent, options: SaveOptions | None = None) -> bool:
        """Starts a save; when it returns, the tensors may change. Called by every rank.

        Returns:
            False if it was skipped because the last one is still being written on some rank.

        Raises:
            CheckpointError: on every rank: this save cannot be done, or the last one failed (this one is then not started; the
                error has been delivered, so it may be tried again).
        """
        if self.when_busy == "skip" and self.busy_anywhere(path):
            return False
        self.wait()
        prepared = PreparedSave(path, content, options or SaveOptions(), self.ranks)
        prepared.stage(self._buffers)
        running = _Running(threading.Thread(target=lambda: self._write(prepared, running), name="checkpoint-writer"))
        self._running = running
        running.thread.start()
        return True

    def wait(self) -> SaveReport | None:
        """Waits until nothing is being written.

        Returns:
            What the last save wrote; None if there was none since the last call.

        Raises:
            CheckpointError: the last save failed; the same on every rank. Raised once.
        """
        running, self._running = self._running, None
        if running is None:
            return None
        running.thread.join()
        if isinstance(running.error, CheckpointError):
            raise running.error
        if running.error is not None:
            raise CheckpointError(f"The checkpoint writer failed. {running.error!r}.") from running.error
        return running.report

    def close(self) -> SaveReport | None:
        """Finishes the last save and frees the copies and the group. Called by every rank, before the group is destroyed.

        Raises:
            CheckpointError: the last save failed.
        """
        try:
            return self.wait()
        finally:
            self._buffers.clear()
            if self._writers.group is not None:
                dist.destroy_process_group(self._writers.group)
                self._writers = Ranks(None, self.ranks.rank, self.ranks.size)

    def __enter__(self) -> AsyncSaver:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _write(self, prepared: PreparedSave, running: _Running) -> None:
        with contextlib.suppress(OSError):  # training goes first where both want the processor; Linux knows threads by id
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        try:
            running.report = prepared.write(self._writers)
        except BaseException as error:  # delivered by `wait`: a thread has no caller
            running.error = error

    def busy_anywhere(self, path: str | os.PathLike[str]) -> bool:
        """A save of some rank is still being written; asked before `path` is saved. Called by every rank."""
        work = Work(str(path), "save")
        flags = self.ranks.collect(work, lambda: self.busy)
        return self.ranks.lead(work, lambda: any(flags or []))


def _writer_ranks(ranks: Ranks) -> Ranks:
    """The same processes in a gloo group of their own."""
    if ranks.size == 1:
        return ranks
    members = dist.get_process_group_ranks(ranks.group)
    group = dist.new_group(members, timeout=_TIMEOUT, backend="gloo", use_local_synchronization=ranks.group is not None)
    return Ranks(group, ranks.rank, ranks.size)
