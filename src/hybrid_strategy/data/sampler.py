"""Batch samplers that know the mesh: data-parallel ranks read disjoint samples, their tensor and pipeline peers the same ones.

Step `i` of an epoch consumes the block `order[i*B*dp : (i+1)*B*dp]`; data-parallel rank `r` takes its contiguous sub-block
`r*B .. (r+1)*B`. So one process with batch size `B*dp` sees the same samples at every step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch.utils.data import Sampler

from hybrid_strategy.data.order import Indices, KeyedOrder, Order, SampledOrder, as_list
from hybrid_strategy.data.position import MeshPosition
from hybrid_strategy.errors import DataError, message


def share_of(rows: int, parts: int, index: int) -> tuple[int, int]:
    """Start and size of the part `index` when `rows` rows are split over `parts`: contiguous, sizes differ by at most 1.

    >>> [share_of(8, 2, i) for i in range(2)], [share_of(5, 3, i) for i in range(3)]
    ([(0, 4), (4, 4)], [(0, 2), (2, 2), (4, 1)])
    """
    base, extra = divmod(rows, parts)
    return index * base + min(index, extra), base + (index < extra)


class MeshBatchSampler(MeshPosition, Sampler[list[Any]]):
    """Batches of one data-parallel rank, for `DataLoader(batch_sampler=...)`; the order is a function of (seed, epoch).

    The last, shorter block of an epoch is split over the ranks as evenly as possible: nothing is dropped (unless `drop_last`)
    and nothing repeated. Where fewer rows than ranks remain, a rank without a row yields one row of padding (the block's
    first), so that all ranks take the same number of steps; `rows_of` is 0 there.

    Args:
        source: how many samples there are, a sampler of the user's own (any iterable of indices), or an `Order`.
        batch_size: rows that one rank consumes at once.
        data_parallel_size: how many ranks share the samples.
        data_parallel_rank: which of them this is.
        shuffle: permute the source anew each epoch.
        seed: the run's seed.
        drop_last: leave out the last block of an epoch where it is shorter.

    Raises:
        DataError: no samples, or none left after `drop_last`.
    """

    def __init__(
        self,
        source: int | Iterable[Any] | Order,
        batch_size: int,
        data_parallel_size: int,
        data_parallel_rank: int,
        *,
        shuffle: bool,
        seed: int,
        drop_last: bool = False,
    ) -> None:
        if batch_size < 1:
            raise DataError(message("batch_size", batch_size, "it must be positive", "", "Set 1 or more"))
        self.batch_size, self.drop_last = batch_size, drop_last
        self.block_size = batch_size * data_parallel_size
        self._order = _order_of(source, seed, shuffle)
        super().__init__(data_parallel_size, data_parallel_rank, seed, worker_stream=data_parallel_rank)
        self._check_not_empty()

    def __iter__(self) -> Iterator[list[Any]]:
        # The position is read here and not at the first `next`: with and without workers an iterator belongs to one epoch.
        first_sample, number = self.next_start
        blocks = self._batches_from(first_sample)
        return self._numbered(self._batches(self._order.indices(self.epoch), first_sample, blocks), number)

    def _batches(self, order: Indices, first_sample: int, blocks: int) -> Iterator[list[Any]]:
        return (self._batch(order, first_sample + block * self.block_size) for block in range(blocks))

    def _batch(self, order: Indices, start: int) -> list[Any]:
        rows = min(self.block_size, len(order) - start)
        offset, size = share_of(rows, self.data_parallel_size, self.data_parallel_rank)
        return as_list(order[start + offset : start + offset + size] if size else order[start : start + 1])

    def _place_of(self, batch_index: int) -> tuple[int, int]:
        """The first sample of the iteration in which that batch is read, and how many blocks of it lie before."""
        block, left = batch_index - self.first_batch, self._batches_from(self.first_sample)
        if block < left:
            return self.first_sample, block
        # a loader that is shorter than its neighbours is read again from its start: numbers go on counting there
        blocks = self._batches_from(0)
        return 0, (block - left) % blocks if blocks else 0

    @property
    def shares_evenly(self) -> bool:
        return self.drop_last or self._order.size(self.epoch) % self.data_parallel_size == 0

    def samples_of(self, batch_index: int) -> list[Any] | None:
        start = self.first_sample + (batch_index - self.first_batch) * self.block_size
        return self._batch(self._order.indices(self.epoch), start) if start < self._order.size(self.epoch) else None

    def order_name(self, consumed: int) -> str:
        return self._order.name(self.epoch, consumed)

    def _batches_from(self, first_sample: int) -> int:
        whole, rest = divmod(self._order.size(self.epoch) - first_sample, self.block_size)
        return whole + (rest > 0 and not self.drop_last)

    def rows_of(self, batch_index: int) -> int:
        return share_of(self.global_rows_of(batch_index), self.data_parallel_size, self.data_parallel_rank)[1]

    def global_rows_of(self, batch_index: int) -> int:
        start, block = self._place_of(batch_index)
        return min(self.block_size, self._order.size(self.epoch) - start - block * self.block_size)

    def consumed_after(self, batches_done: int) -> int:
        again = batches_done < self.first_batch  # what was left when it resumed has been read, and it began at its start
        first_sample, first_batch = (0, 0) if again else (self.first_sample, self.first_batch)
        return min(first_sample + (batches_done - first_batch) * self.block_size, self._order.size(self.epoch))

    def _check_position(self) -> None:
        super()._check_position()
        if self.first_sample:
            self._check_size(self._order.size(self.epoch))

    def _check_not_empty(self) -> None:
        size = self._order.size(self.epoch)
        if size == 0:
            raise DataError(message("len(dataset)", 0, "there must be at least one sample", "", "Give data that is not empty"))
        if len(self) == 0:
            numbers = f"batch_size {self.batch_size} x data_parallel_size {self.data_parallel_size} = {self.block_size} rows"
            rule = "with drop_last it must fill one step"
            raise DataError(message("len(dataset)", size, rule, numbers, "Set a smaller batch_size or drop_last=False"))


def _order_of(source: int | Iterable[Any] | Order, seed: int, shuffle: bool) -> Order:
    if isinstance(source, int):
        return KeyedOrder(source, shuffle, seed)
    if isinstance(source, Iterable):
        return SampledOrder(source, seed, shuffle)
    return source


class MeshItemSampler(MeshBatchSampler):
    """One index at a time instead of a list of one: for a loader with `batch_size=None`, where an item is a whole batch."""

    def __iter__(self) -> Iterator[Any]:
        return (batch[0] for batch in super().__iter__())
