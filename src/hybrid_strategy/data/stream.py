"""Data that can only be read in order (`IterableDataset`), shared out over the data-parallel ranks.

Every rank reads the whole stream of each of its workers and keeps its share of every block of `batch_size x
data_parallel_size` consecutive samples of that worker. So all ranks take the same number of steps, and their batches
together are those of one process with a batch size of the block.

A dataset that already yields only the share of its data-parallel rank says so with an attribute
`data_parallel_sharded = True`; then nothing is left out here, and an epoch ends where the first rank has no more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any, NamedTuple

from torch.utils.data import Sampler

from hybrid_strategy.data.common_end import all_have_more, common_length, say_left_over
from hybrid_strategy.data.position import MeshPosition
from hybrid_strategy.data.sampler import share_of


class Share(NamedTuple):
    """A rank's batch on its way from the worker: its real rows (0: padding), the rows of the whole block, the batch."""

    rows: int
    block_rows: int
    batch: Any


@dataclass(frozen=True)
class ShareCollate:
    """Makes a batch of this rank's share of a block; runs in the worker.

    Attributes:
        collate: the loader's own `collate_fn`.
        parts: over how many ranks the block is split.
        index: which of them this is.
        whole_items: the loader has `batch_size=None`: each item is a whole batch, and `collate` gets one item.
    """

    collate: Callable[[Any], Any]
    parts: int
    index: int
    whole_items: bool

    def __call__(self, block: list[Any]) -> Share:
        offset, size = share_of(len(block), self.parts, self.index)
        mine = block[offset : offset + size] or block[:1]
        return Share(size, len(block), self.collate(mine[0] if self.whole_items else mine))


@dataclass(frozen=True)
class StreamSpec:
    """What a `MeshStream` is made of.

    Attributes:
        dataset: the user's `IterableDataset`.
        batch_size: samples that one rank consumes at once; 1 where each item is a whole batch.
        num_workers: worker processes of the loader.
        drop_last: leave out the last block of each worker where it is shorter.
        joined: how many of the user's batches are joined to one.
    """

    dataset: Any
    batch_size: int
    num_workers: int
    drop_last: bool
    joined: int


class MeshStream(MeshPosition, Sampler[list[None]]):
    """Stands in for the batch sampler of a loader over an `IterableDataset`: it says how many samples to read at once.

    What a batch holds is known once it has arrived, so `rows_of` speaks of batches that the loader has yielded.

    A resumption reads the consumed samples again and leaves them out. It is exact while the number of workers stays the same
    (a worker's stream is its own); if the block size changes too, as long as no worker's stream had come to its end.
    """

    def __init__(self, spec: StreamSpec, data_parallel_size: int, data_parallel_rank: int, *, seed: int) -> None:
        self.spec = spec
        self.sharded = bool(getattr(spec.dataset, "data_parallel_sharded", False))
        self.parts = 1 if self.sharded else data_parallel_size
        self.block_size = self._replay_block = spec.batch_size * self.parts
        self._short: dict[int, tuple[int, int]] = {}
        self._end: int | None = None
        self.ends_together = self.sharded and data_parallel_size > 1
        self._length = common_length(spec.dataset) if self.ends_together else None
        # A dataset that shuffles by its worker's random state must do so alike on all ranks that share its stream.
        super().__init__(data_parallel_size, data_parallel_rank, seed, data_parallel_rank if self.sharded else 0)

    def __iter__(self) -> Iterator[list[None]]:
        whole, rest = divmod(self.next_start[0], self._replay_block)
        replayed: list[list[None]] = [[None] * self._replay_block] * whole + ([[None] * rest] if rest else [])
        return chain(replayed, repeat([None] * self.block_size))

    def share_collate(self, collate: Callable[[Any], Any], whole_items: bool) -> ShareCollate:
        """The `collate_fn` that picks this rank's share."""
        return ShareCollate(collate, self.parts, 0 if self.sharded else self.data_parallel_rank, whole_items)

    def _batches_from(self, first_sample: int) -> int:
        """As many steps as the dataset's own length says.

        Raises:
            TypeError: the dataset has no length, or several workers each end with a shorter block (then the number of steps
                depends on how the dataset divides itself, and a trainer that believed a length would leave samples out).
        """
        if self.spec.num_workers > 1 and self.spec.joined * self.parts > 1:
            raise TypeError("a stream read by several workers has no known number of steps")
        size = len(self.spec.dataset) if self._length is None else self._length
        left = max(0, size - first_sample)
        return left // self.block_size if self.spec.drop_last else -(-left // self.block_size)

    def rows_of(self, batch_index: int) -> int:
        return self._short.get(batch_index, (self.spec.batch_size, self.block_size))[0]

    def global_rows_of(self, batch_index: int) -> int | None:
        return None if self.sharded else self._short.get(batch_index, (self.spec.batch_size, self.block_size))[1]

    def consumed_after(self, batches_done: int) -> int:
        missing = sum(self.block_size - rows for index, (_, rows) in self._short.items() if index < batches_done)
        return self.first_sample + max(0, batches_done - self.first_batch) * self.block_size - missing

    def arrived(self, batch_index: int, share: Share) -> None:
        """Keeps in mind the rows of a batch that the loader is about to yield."""
        if share.block_rows < self.block_size:
            self._short[batch_index] = share.rows, share.block_rows

    @property
    def batches_of_a_pass(self) -> int | None:
        try:
            return len(self) if self._end is None else self._end
        except TypeError:
            return None

    def ended(self, batches: int) -> None:
        """The loader has yielded all batches of this epoch."""
        self._end = batches

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        self._tell_dataset()

    def _tell_dataset(self) -> None:
        set_epoch = getattr(self.spec.dataset, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(self.epoch)

    def state_dict(self, batches_done: int | None = None) -> dict[str, int]:
        done = self.batches_done if batches_done is None else batches_done
        if self._end == done:
            return {"epoch": self.epoch + 1, "consumed_samples": 0, "batches_done": 0, "block_size": self.block_size}
        return super().state_dict(done)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._replay_block = int(state.get("block_size", self.block_size))
        self._tell_dataset()  # workers get a copy of it before the trainer sets the epoch

    def _go_to(self, epoch: int, first_sample: int, first_batch: int | None) -> None:
        super()._go_to(epoch, first_sample, first_batch)
        self._short, self._end, self._replay_block = {}, None, self.block_size

    def _batches_before(self, first_sample: int) -> int:
        try:
            return super()._batches_before(first_sample)
        except TypeError:
            return first_sample // self.block_size

    def _at_end(self) -> bool:
        try:
            return super()._at_end()
        except TypeError:
            return False


class StreamIterator:
    """Iterates the user's loader: leaves out what was consumed before a resumption, notes each batch's rows, yields the batch."""

    def __init__(self, shares: Iterator[Share], stream: MeshStream) -> None:
        self._shares, self._stream = shares, stream
        self._to_skip, self._next_batch = stream.next_start

    def __iter__(self) -> StreamIterator:
        return self

    def __next__(self) -> Any:
        while self._to_skip > 0:
            self._to_skip -= self._next_share().block_rows
        share = self._next_share()
        self._stream.arrived(self._next_batch, share)
        self._next_batch += 1
        return share.batch

    def _next_share(self) -> Share:
        share = next(self._shares, None)
        more = share is not None
        if self._stream.ends_together and not all_have_more(more):
            say_left_over(self._next_batch, more)
            share = None
        if share is None:
            self._stream.ended(self._next_batch)
            raise StopIteration
        return share
