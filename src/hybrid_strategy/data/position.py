"""Where a run stands in its data: an epoch and the number of its samples that the whole run has consumed.

A DataLoader reads ahead, so what a sampler has handed out says nothing about what was trained on. The position is therefore
told by the trainer (`batches_done`), and it counts samples of the run, not batches of a rank, so that it survives another
data-parallel size or batch size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch

from hybrid_strategy.data.order import LOADING, WORKERS, KeyedBatch, random_key
from hybrid_strategy.errors import DataError, message


class MeshPosition(ABC):
    """What every mesh-aware source of batches can do.

    Batches are counted from 0 at the start of an epoch. After `resume` the next iteration begins with batch `first_batch`, and
    `len()` is that of a whole epoch: this is how Lightning counts after a restart in the middle of an epoch. A trainer that
    restarts in another layout sets its own count of finished batches to `first_batch`.

    Attributes:
        epoch: the epoch that the next iteration reads.
        first_sample: samples of this epoch that were consumed before the next iteration.
        first_batch: the number of the next iteration's first batch.
        batches_done: batches of this epoch that the trainer has finished. Set by the trainer, read by `state_dict()`.
        batches_apart: how much higher the trainer counts the batches of this epoch than they are counted here. Set by it:
            of several loaders that go on in another layout, one has its way.
        block_size: samples that all data-parallel ranks together consume at once (0: it varies).
        seed: the run's seed.
        worker_stream: ranks with the same number here draw the same random numbers while they load.
        worker_generator: where a DataLoader draws its workers' seeds from: the same on all ranks that read the same samples.
    """

    block_size: int = 0

    def __init__(self, data_parallel_size: int, data_parallel_rank: int, seed: int, worker_stream: int) -> None:
        if not 0 <= data_parallel_rank < data_parallel_size:
            numbers = f"data_parallel_size is {data_parallel_size}"
            rule = "it must lie in [0, data_parallel_size)"
            raise DataError(message("data_parallel_rank", data_parallel_rank, rule, numbers, "Set a rank of the axis"))
        self.data_parallel_size, self.data_parallel_rank, self.seed = data_parallel_size, data_parallel_rank, seed
        self.worker_generator = torch.Generator()
        self._extra_seed = 0
        self.worker_stream = worker_stream
        self._go_to(0, 0, 0)

    def __len__(self) -> int:
        """Batches of this epoch on each rank, those before a resumption included."""
        return self.first_batch + self._batches_from(self.first_sample)

    @abstractmethod
    def _batches_from(self, first_sample: int) -> int:
        """Batches of this epoch that hold the samples from `first_sample` on."""

    @abstractmethod
    def rows_of(self, batch_index: int) -> int:
        """How many rows of that batch are real on this rank; 0: the batch is one row of padding, to be weighed by zero."""

    @abstractmethod
    def global_rows_of(self, batch_index: int) -> int | None:
        """How many rows all data-parallel ranks together have at that step; None: unknown here, to be summed over the ranks."""

    @property
    def shares_evenly(self) -> bool:
        """Every rank gets as many rows of each batch as the others, as far as that is known."""
        return True

    def samples_of(self, batch_index: int) -> list[Any] | None:
        """The indices in the dataset of this rank's rows of that batch; `None` where only the dataset knows them."""
        return None

    @abstractmethod
    def consumed_after(self, batches_done: int) -> int:
        """Samples of this epoch that the whole run has consumed once the batches before `batches_done` are finished."""

    def order_name(self, consumed: int) -> str:
        """Words that are the same for two orders of this epoch only where their first `consumed` samples are; empty: unknown."""
        return ""

    @property
    def sampler(self) -> MeshPosition:
        """Itself: Lightning sets the epoch on `batch_sampler.sampler`, not on `batch_sampler`."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Another epoch begins at its first sample; the epoch at hand keeps its position."""
        if epoch != self.epoch:
            self._go_to(epoch, 0, 0)

    def resume(self, epoch: int, consumed_samples: int, batches_done: int | None = None) -> None:
        """The next iteration yields those samples of `epoch` that come after the first `consumed_samples`.

        Call it before the loader is iterated: workers read ahead at once. An epoch that is consumed to its end is followed by
        the next one.

        Args:
            epoch: the epoch that was interrupted.
            consumed_samples: samples of it that the whole run has consumed.
            batches_done: the number of the next batch, default: as many batches as this layout needs for those samples.

        Raises:
            DataError: the epoch does not have that many samples.
        """
        self._go_to(epoch, consumed_samples, batches_done)
        if consumed_samples and self._at_end():
            self._go_to(epoch + 1, 0, 0)

    def stay_at_end(self, epoch: int, consumed_samples: int) -> None:
        """The next iteration yields nothing: `epoch` is consumed to its end, and goes on for other loaders."""
        self._go_to(epoch, consumed_samples, None)

    @property
    def batches_of_a_pass(self) -> int | None:
        """Batches in which all samples of this epoch are read once, as far as that is known."""
        return len(self)

    def state_dict(self, batches_done: int | None = None) -> dict[str, int]:
        """The position once `batches_done` batches (default: those the trainer has finished) are done; the same on all ranks."""
        done = self.batches_done if batches_done is None else batches_done
        position = {"epoch": self.epoch, "consumed_samples": self.consumed_after(done)}
        return {**position, "batches_done": done, "block_size": self.block_size}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resumes where `state` was taken, in this layout or another."""
        same_blocks = self.block_size > 0 and state.get("block_size") == self.block_size
        self.resume(int(state["epoch"]), int(state["consumed_samples"]), int(state["batches_done"]) if same_blocks else None)

    def mix_seed(self, number: int) -> None:
        """The random numbers drawn while loading depend on `number` too; the order of the samples does not."""
        self._extra_seed = number
        self._go_to(self.epoch, self.first_sample, self.first_batch)

    @property
    def next_start(self) -> tuple[int, int]:
        """The first sample of the next iteration and the number of its batch: where it resumes, and 0 once that has been read.

        A loader that is shorter than its neighbours is read several times in an epoch.
        """
        return (0, 0) if self._is_read else (self.first_sample, self.first_batch)

    def keys(self) -> Callable[[int], int]:
        """What the random numbers drawn while a batch of this epoch is loaded depend on: its number, not who loads it."""
        return partial(random_key, LOADING, self.seed, self.epoch, self.worker_stream, self._extra_seed)

    def _numbered(self, batches: Iterable[Any], number: int) -> Iterator[Any]:
        """The batches of an iteration of this epoch, those that are lists with their keys."""
        key = self.keys()
        return (
            KeyedBatch(batch, key(index)) if isinstance(batch, list) else batch for index, batch in enumerate(batches, number)
        )

    def note_end(self, epoch: int) -> None:
        """Somebody has had all batches of an iteration of `epoch`, which have been read ahead before."""
        self._is_read |= epoch == self.epoch

    def _go_to(self, epoch: int, first_sample: int, first_batch: int | None) -> None:
        self.epoch, self.first_sample, self.first_batch, self._is_read = epoch, first_sample, 0, False
        key = random_key(WORKERS, self.seed, epoch, self.worker_stream, self._extra_seed)
        self.worker_generator.manual_seed(key)
        self._check_position()
        self.first_batch = self._batches_before(first_sample) if first_batch is None else first_batch
        self.batches_done, self.batches_apart = self.first_batch, 0

    def _batches_before(self, first_sample: int) -> int:
        """What must be counted as done, for the epoch to have its usual number of batches."""
        return self._batches_from(0) - self._batches_from(first_sample)

    def _at_end(self) -> bool:
        """Is nothing left of this epoch?"""
        return self._batches_from(self.first_sample) == 0

    def _check_position(self) -> None:
        """Raises DataError where the epoch does not have `first_sample` samples."""
        if self.first_sample < 0:
            raise DataError(message("consumed_samples", self.first_sample, "it must not be negative", "", "Set 0 or more"))

    def _check_size(self, size: int) -> None:
        if self.first_sample > size:
            rule, numbers = "it must lie within the epoch", f"Epoch {self.epoch} has {size} samples"
            advice = "Resume with the data of the saved run"
            raise DataError(message("consumed_samples", self.first_sample, rule, numbers, advice))
