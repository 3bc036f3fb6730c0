"""Which dimension of a batch's tensors counts its samples, found out by collating one sample of it alone.

A tensor's size does not tell: a mask `[s, s]` that all samples share looks like s samples when a batch has as many. What the
loader's own `collate_fn` makes of one sample tells it: where the batch has n, one sample gives 1; what is shared keeps its size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from torch.utils.data import get_worker_info

from hybrid_strategy.data.order import RandomStreams

SampleDims = Mapping[str, int | None]
"""Dotted path of a tensor in the batch -> its batch dimension (`None`: shared by all samples); what is not clear is left out."""
Look = Callable[[Any, Any, int], SampleDims]
"""`look(batch, alone, n)` compares a batch of n samples with what `collate_fn` makes of its first one alone."""


class Told(NamedTuple):
    """A batch on its way from a worker, with what was found out about it (`None`: nothing new)."""

    dims: SampleDims | None
    batch: Any


class DimsCollate:
    """The loader's `collate_fn`; the first batch of two samples or more is looked at.

    Args:
        collate: the loader's own.
        look: compares.

    Attributes:
        dims: what was found; `None` before.
    """

    def __init__(self, collate: Callable[[list[Any]], Any], look: Look) -> None:
        self.collate, self.look = collate, look
        self.dims: SampleDims | None = None

    def __call__(self, samples: list[Any]) -> Any:
        batch = self.collate(samples)
        new = None
        if self.dims is None and len(samples) > 1:
            new = self.dims = self._found(batch, samples)
        return batch if get_worker_info() is None else Told(new, batch)

    def _found(self, batch: Any, samples: list[Any]) -> SampleDims:
        with RandomStreams(0):  # a collation that draws random numbers draws the same ones with and without this
            try:
                alone = self.collate(samples[:1])
            except Exception:  # whatever a user's function raises that is not made for one sample: then nothing is known
                return {}
        return self.look(batch, alone, len(samples))


class TellingIterator:
    """Iterates a loader and passes on what its workers found out.

    Args:
        inner: batches, or `Told` ones.
        tell: gets what was found out.
    """

    def __init__(self, inner: Iterator[Any], tell: Callable[[SampleDims], None]) -> None:
        self._inner, self._tell = inner, tell

    def __iter__(self) -> TellingIterator:
        return self

    def __next__(self) -> Any:
        return untold(next(self._inner), self._tell)


def untold(batch: Any, tell: Callable[[SampleDims], None]) -> Any:
    """The user's batch."""
    if not isinstance(batch, Told):
        return batch
    if batch.dims is not None:
        tell(batch.dims)
    return batch.batch
