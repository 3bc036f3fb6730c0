"""Which positions of a sequence each context-parallel rank holds.

A sequence is cut into 2n chunks and rank r holds chunks r and 2n-1-r (Llama 3, arXiv:2407.21783 section 3.3.2): under a
causal mask position i attends to i+1 others, and so every rank has the same work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from hybrid_strategy.parallel.context.region import ContextRegion


@lru_cache(maxsize=64)
def balanced_positions(length: int, size: int) -> tuple[Tensor, ...]:
    """The positions of each of `size` ranks, in ascending order.

    >>> [each.tolist() for each in balanced_positions(8, 2)]
    [[0, 1, 6, 7], [2, 3, 4, 5]]
    """
    with torch.inference_mode(False):  # what is made in evaluation serves training too
        chunks = torch.arange(length).chunk(2 * size)
        return tuple(torch.cat((chunks[rank], chunks[-1 - rank])) for rank in range(size))


@lru_cache(maxsize=64)
def _balanced_slots(length: int, size: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return _slots(balanced_positions(length, size), length).to(device)


def _slots(positions: Sequence[Tensor], length: int) -> Tensor:
    """Where each position lies when the ranks' parts stand one after another, each as long as the longest."""
    longest = max(len(each) for each in positions)
    slots = torch.empty(length, dtype=torch.int64)
    for rank, held in enumerate(positions):
        slots[held] = rank * longest + torch.arange(len(held))
    return slots


@dataclass(frozen=True, eq=False)
class SequenceSpan:
    """How a dimension lies over the ranks.

    Attributes:
        region: the ranks.
        positions: of each rank, in the dimension's order; ranks may hold unequally many after a slice.
        length: of the whole dimension, leaving `outer` out.
        outer: leading entries that were flattened into the dimension: it is `outer * length` long.
        changed: it was sliced since it was first cut.
        scattered: the sequence-parallel ranks hold further parts, so that nobody knows the positions of what it holds.
    """

    region: ContextRegion
    positions: tuple[Tensor, ...]
    length: int
    outer: int = 1
    changed: bool = False
    scattered: bool = False

    @staticmethod
    def of(region: ContextRegion, length: int, scattered: bool = False) -> SequenceSpan:
        """The span of a sequence of `length` as it is first cut."""
        return SequenceSpan(region, balanced_positions(length, region.size), length, scattered=scattered)

    @property
    def own(self) -> Tensor:
        return self.positions[self.region.rank]

    @property
    def whole_size(self) -> int:
        """Size of the whole dimension as the model sees it."""
        return self.outer * self.length // (self.region.tensor_size if self.scattered else 1)

    def is_fresh(self) -> bool:
        """Is it as it was first cut, so that a unit may take the part as it is?"""
        return self.outer == 1 and not self.changed

    def same_as(self, other: SequenceSpan) -> bool:
        """Do two dimensions lie alike?"""
        alike = (self.length, self.outer, self.scattered) == (other.length, other.outer, other.scattered)
        return alike and all(torch.equal(mine, theirs) for mine, theirs in zip(self.positions, other.positions, strict=True))

    def flattened(self, rows: int) -> SequenceSpan:
        """The dimension after `outer` has become `rows`."""
        return replace(self, outer=rows)

    def sliced(self, start: int, stop: int) -> tuple[SequenceSpan, slice]:
        """The span of positions `start .. stop - 1`, and where these lie in this rank's part."""
        kept = tuple(each[(each >= start) & (each < stop)] - start for each in self.positions)
        before = int((self.own < start).sum())
        return replace(self, positions=kept, length=stop - start, changed=True), slice(
            before, before + len(kept[self.region.rank])
        )

    def own_index(self, device: torch.device) -> Tensor:
        """Indices of this rank's part in the whole dimension."""
        own = self.own
        if self.outer > 1:
            own = (torch.arange(self.outer).unsqueeze(1) * self.length + own).flatten()
        return own.to(device)

    def own_part(self, whole: Tensor, dim: int) -> Tensor:
        """This rank's part of a tensor whose dimension `dim` is whole; differentiable."""
        return whole.index_select(dim, self.own_index(whole.device))

    def slots(self, device: torch.device) -> Tensor:
        """Where each position lies when the ranks' parts stand one after another, each as long as the longest."""
        if not self.changed:
            return _balanced_slots(self.length, self.region.size, device)
        return _slots(self.positions, self.length).to(device)

    @property
    def longest(self) -> int:
        return max(len(each) for each in self.positions)
