"""In which order an epoch's samples are read: a pure function of (seed, epoch), the same on every rank.

Samplers of the user's own are read under random states keyed by (seed, epoch), so that they too give every rank one order.
"""

from __future__ import annotations

import random
import zlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from torch.utils.data import get_worker_info

# What a key is used for: different purposes must not share random numbers.
PERMUTATION, USER_SAMPLER, WORKERS, LOADING = range(4)

_CHUNK = 1 << 16
_MASK = 2**64 - 1

Indices: TypeAlias = "np.ndarray[Any, np.dtype[Any]] | range | list[Any]"


def random_key(purpose: int, *numbers: int) -> int:
    """A 63-bit seed that depends on `purpose` and on all `numbers` (of any sign and size)."""
    entropy = [purpose, len(numbers), *(number & _MASK for number in numbers)]
    return int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0] >> np.uint64(1))


def seed_cpu(key: int) -> None:
    """Starts the generators of Python, numpy and torch (CPU) anew."""
    random.seed(key)
    np.random.seed(key & 0xFFFFFFFF)
    torch.default_generator.manual_seed(key)


class RandomStreams:
    """The random states of Python, numpy and torch (CPU) as one stream apart from the process's own.

    `with streams:` puts them in place of the process's states and takes them out again, advanced, at the end.
    """

    def __init__(self, key: int) -> None:
        self._key = key
        self._states: tuple[Any, Any, torch.Tensor] | None = None

    def _exchange(self) -> None:
        here = random.getstate(), np.random.get_state(legacy=False), torch.get_rng_state()
        if self._states is None:
            seed_cpu(self._key)
        else:
            random.setstate(self._states[0])
            np.random.set_state(self._states[1])
            torch.set_rng_state(self._states[2])
        self._states = here

    def __enter__(self) -> RandomStreams:
        self._exchange()
        return self

    def __exit__(self, *_: object) -> None:
        self._exchange()


class KeyedBatch(list[Any]):
    """The indices of a batch. A worker that is about to read them draws from here on by their key, whichever worker it is.

    torch's workers go through the indices at the start of a batch and nowhere else, and hand nothing else over.
    """

    def __init__(self, indices: Iterable[Any], key: int) -> None:
        super().__init__(indices)
        self.key = key

    def __iter__(self) -> Iterator[Any]:
        if get_worker_info() is not None:
            seed_cpu(self.key)
        return super().__iter__()


def generators_of(sampler: object) -> list[torch.Generator]:
    """The torch generators that a sampler, or the sampler inside a batch sampler, draws from."""
    owners = (sampler, getattr(sampler, "sampler", None))
    found = [getattr(owner, "generator", None) for owner in owners]
    return [generator for generator in found if isinstance(generator, torch.Generator)]


@contextmanager
def _keyed_generator(generator: torch.Generator, seed: int, epoch: int) -> Iterator[None]:
    """Seeds `generator` by (seed, epoch) and the seed the user gave it; puts its state back at the end."""
    initial, state = generator.initial_seed(), generator.get_state()
    generator.manual_seed(random_key(USER_SAMPLER, seed, epoch, initial))
    try:
        yield
    finally:
        generator.set_state(state)


@contextmanager
def keyed_by_epoch(sampler: object, seed: int, epoch: int) -> Iterator[None]:
    """Within it, everything `sampler` may draw from is a function of (seed, epoch); `set_epoch` is called where there is one."""
    for owner in (sampler, getattr(sampler, "sampler", None)):
        set_epoch = getattr(owner, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)
    with ExitStack() as stack:
        for generator in generators_of(sampler):
            stack.enter_context(_keyed_generator(generator, seed, epoch))
        stack.enter_context(RandomStreams(random_key(USER_SAMPLER, seed, epoch)))
        yield


def compact(indices: Iterable[Any]) -> Indices:
    """Reads `indices` to the end: int64 numbers where all are integers (8 bytes each), else a list of the keys themselves."""
    numbers, iterator = array("q"), iter(indices)
    while chunk := list(islice(iterator, _CHUNK)):
        known = len(numbers)
        try:
            numbers.extend(chunk)
        except (TypeError, ValueError, OverflowError):  # keys that are no integers: tuples, strings, tensors of several
            return [*numbers[:known], *chunk, *iterator]
    return np.frombuffer(numbers, dtype=np.int64) if numbers else np.empty(0, dtype=np.int64)


def as_list(indices: Sequence[Any] | Indices) -> list[Any]:
    """A slice of an order as the plain list that a DataLoader hands to its dataset."""
    listed: list[Any] = indices.tolist() if isinstance(indices, np.ndarray) else list(indices)
    return listed


def digest_of(indices: Sequence[Any] | Indices, count: int) -> str:
    """A short digest of the first `count` indices; of very many, only the first are looked at."""
    return f"digest {zlib.crc32(repr(as_list(indices[: min(count, _CHUNK)])).encode()):08x}"


class Order(Protocol):
    """The order of one epoch's samples."""

    def indices(self, epoch: int) -> Indices:
        """All indices of `epoch`, in order."""

    def size(self, epoch: int) -> int:
        """How many indices `epoch` has."""

    def name(self, epoch: int, consumed: int) -> str:
        """Words that are the same for two orders only where the first `consumed` indices of `epoch` are."""


@dataclass(frozen=True)
class KeyedOrder:
    """`length` samples in their own order or shuffled by (seed, epoch).

    Attributes:
        length: how many samples the dataset has.
        shuffle: a new permutation each epoch; it costs 4 bytes a sample (8 from 2^31 samples on).
        seed: the run's seed.
        num_samples: how many samples an epoch draws, default: `length`.
        replacement: each draw is independent of the others.
    """

    length: int
    shuffle: bool = False
    seed: int = 0
    num_samples: int | None = None
    replacement: bool = False

    def size(self, epoch: int) -> int:
        return self.length if self.num_samples is None else self.num_samples

    def name(self, epoch: int, consumed: int) -> str:
        if not self.shuffle:
            return "in order"
        drawn = "" if self.num_samples in (None, self.length) else f", {self.num_samples} drawn"
        return f"shuffled, {self.length} samples{drawn}{' with replacement' * self.replacement}, seed {self.seed}"

    def indices(self, epoch: int) -> Indices:
        size = self.size(epoch)
        if not self.shuffle:
            return range(size)
        numbers = np.random.Generator(np.random.PCG64(random_key(PERMUTATION, self.seed, epoch)))
        dtype = np.int32 if self.length < 2**31 else np.int64
        if self.replacement:
            return numbers.integers(0, self.length, size=size, dtype=dtype)
        if size <= self.length:
            return _permutation(numbers, self.length, dtype)[:size]
        rounds = -(-size // self.length)
        return np.concatenate([_permutation(numbers, self.length, dtype) for _ in range(rounds)])[:size]


def _permutation(numbers: np.random.Generator, length: int, dtype: type[Any]) -> np.ndarray[Any, np.dtype[Any]]:
    order = np.arange(length, dtype=dtype)
    numbers.shuffle(order)
    return order


class SampledOrder:
    """The order that a sampler of the user's own gives, read once an epoch; `shuffle` permutes it by (seed, epoch)."""

    def __init__(self, sampler: Iterable[Any], seed: int, shuffle: bool = False) -> None:
        self.sampler, self.seed, self.shuffle = sampler, seed, shuffle
        self._epoch: int | None = None
        self._indices: Indices = []

    def size(self, epoch: int) -> int:
        return len(self.indices(epoch))

    def name(self, epoch: int, consumed: int) -> str:
        return f"of {type(self.sampler).__name__}, {digest_of(self.indices(epoch), consumed)}"

    def indices(self, epoch: int) -> Indices:
        if self._epoch != epoch:
            self._indices, self._epoch = self._read(epoch), epoch
        return self._indices

    def _read(self, epoch: int) -> Indices:
        with keyed_by_epoch(self.sampler, self.seed, epoch):
            indices = compact(self.sampler)
        if not self.shuffle:
            return indices
        order = KeyedOrder(len(indices), True, self.seed).indices(epoch)
        if isinstance(indices, np.ndarray):
            return np.take(indices, np.asarray(order))
        return [indices[place] for place in order]
