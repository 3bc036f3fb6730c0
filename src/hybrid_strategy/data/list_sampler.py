"""Batches that a batch sampler of the user's own has put together, dealt to the data-parallel ranks in turn."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from torch.utils.data import Sampler

from hybrid_strategy.data.order import as_list, compact, digest_of, keyed_by_epoch
from hybrid_strategy.data.position import MeshPosition
from hybrid_strategy.errors import DataError, message


class MeshListBatchSampler(MeshPosition, Sampler[Any]):
    """Deals the entries of a batch sampler of the user's own: entry `k` goes to data-parallel rank `k % data_parallel_size`.

    The entries of an epoch are read once, under random states keyed by (seed, epoch).

    Args:
        entries: the user's batch sampler (or sampler, for `batch_size=None`); it must have a length.
        data_parallel_size: how many ranks share the entries.
        data_parallel_rank: which of them this is.
        seed: the run's seed.
        batch_multiplier: so many consecutive entries are joined to one.
        whole_entries: for a loader with `batch_size=None`: the dataset gets each entry as it is. Only an entry that is a list
            has rows; any other counts as one.

    Raises:
        DataError: no entries, or entries that cannot be joined.
    """

    def __init__(
        self,
        entries: Iterable[Any],
        data_parallel_size: int,
        data_parallel_rank: int,
        *,
        seed: int,
        batch_multiplier: int = 1,
        whole_entries: bool = False,
    ) -> None:
        self.entries, self.batch_multiplier, self._whole_entries = entries, batch_multiplier, whole_entries
        self._cached: tuple[int, list[Any], np.ndarray[Any, Any]] | None = None
        super().__init__(data_parallel_size, data_parallel_rank, seed, worker_stream=data_parallel_rank)
        if not self._read()[0]:
            rule = "there must be at least one batch"
            raise DataError(message("len(batch_sampler)", 0, rule, "", "Give data that is not empty"))

    def __iter__(self) -> Iterator[Any]:
        first_sample, number = self.next_start
        return self._numbered(self._dealt(self._read()[0], self._entry_at(first_sample)), number)

    def _dealt(self, entries: list[Any], first: int) -> Iterator[Any]:
        for start in range(first, len(entries), self.data_parallel_size):
            mine = start + self.data_parallel_rank
            yield _plain(entries[mine]) if mine < len(entries) else _one_row(entries[start])

    def _batches_from(self, first_sample: int) -> int:
        return -(-(len(self._read()[0]) - self._entry_at(first_sample)) // self.data_parallel_size)

    def order_name(self, consumed: int) -> str:
        return f"of {type(self.entries).__name__}, {digest_of(self._read()[0], self._entry_at(consumed))}"

    def rows_of(self, batch_index: int) -> int:
        mine = self._step_start(batch_index) + self.data_parallel_rank
        return self._rows_between(mine, mine + 1)

    def global_rows_of(self, batch_index: int) -> int:
        start = self._step_start(batch_index)
        return self._rows_between(start, start + self.data_parallel_size)

    def consumed_after(self, batches_done: int) -> int:
        again = batches_done < self.first_batch  # what was left when it resumed has been read, and it began at its start
        entry, steps = (0, batches_done) if again else (self._entry_at(self.first_sample), batches_done - self.first_batch)
        return self._rows_between(0, entry + steps * self.data_parallel_size)

    def _step_start(self, batch_index: int) -> int:
        """The entry of data-parallel rank 0 at that step."""
        step, left = batch_index - self.first_batch, self._batches_from(self.first_sample)
        if step < left:
            return self._entry_at(self.first_sample) + step * self.data_parallel_size
        steps = self._batches_from(0)  # read again from its start
        return (step - left) % steps * self.data_parallel_size if steps else 0

    def _rows_between(self, start: int, stop: int) -> int:
        """Rows of the entries `start .. stop`, those past the end counting nothing."""
        bounds = self._read()[1]
        return int(bounds[min(stop, len(bounds) - 1)] - bounds[min(start, len(bounds) - 1)])

    def _entry_at(self, sample: int) -> int:
        return int(np.searchsorted(self._read()[1], sample))

    def _read(self) -> tuple[list[Any], np.ndarray[Any, Any]]:
        """The entries of this epoch, and the rows before each of them (one more bound than entries)."""
        if self._cached is None or self._cached[0] != self.epoch:
            with keyed_by_epoch(self.entries, self.seed, self.epoch):
                found = [self._held(entry) for entry in self.entries]
            if self.batch_multiplier > 1:
                groups = range(0, len(found), self.batch_multiplier)
                found = [_joined(found[start : start + self.batch_multiplier]) for start in groups]
            bounds = np.cumsum([0, *(_rows(entry) for entry in found)])
            self._cached = self.epoch, found, bounds
        return self._cached[1], self._cached[2]

    def _held(self, entry: Any) -> Any:
        """An entry as it is kept: 8 bytes an index, where the entry is a list of integers."""
        return entry if self._whole_entries and not isinstance(entry, list) else compact(entry)

    def _check_position(self) -> None:
        super()._check_position()
        if not self.first_sample:
            return
        bounds = self._read()[1]
        self._check_size(int(bounds[-1]))
        entry = self._entry_at(self.first_sample)
        if bounds[entry] != self.first_sample:
            numbers = f"Epoch {self.epoch} has batches that end at {bounds[entry - 1]} and {bounds[entry]}"
            rule = "it must be the end of a batch of the batch_sampler"
            advice = "Give a batch_sampler whose batches depend on the epoch only"
            raise DataError(message("consumed_samples", self.first_sample, rule, numbers, advice))


def _plain(entry: Any) -> Any:
    return as_list(entry) if isinstance(entry, (np.ndarray, list)) else entry


def _rows(entry: Any) -> int:
    return len(entry) if isinstance(entry, (np.ndarray, list)) else 1


def _one_row(entry: Any) -> Any:
    return _plain(entry[:1]) if isinstance(entry, (np.ndarray, list)) else entry


def _joined(entries: list[Any]) -> Any:
    if not all(isinstance(entry, (np.ndarray, list)) for entry in entries):
        rule = "batches that the dataset makes itself cannot be joined to a larger one"
        raise DataError(message("batch_size", None, rule, "", "Give a sampler that yields lists of indices, or a batch_size"))
    return [index for entry in entries for index in as_list(entry)]
