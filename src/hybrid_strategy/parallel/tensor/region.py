"""The tensor-parallel region as one rank sees it: how activations enter and leave where ranks compute different slices."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup

from hybrid_strategy.parallel.tensor import collectives
from hybrid_strategy.parallel.tensor.random import RegionRandom
from hybrid_strategy.spec.shard import even_chunk


@dataclass(eq=False)
class Region:
    """The tensor-parallel group of this rank.

    Attributes:
        group: the ranks among which layers are sliced.
        rank: this rank's index in `group`.
        size: number of ranks in `group`.
        sequence_parallel: outside the region activations are shards `[b, s/size, h]`, not replicas `[b, s, h]`.
        random: this rank's random state inside a sub-block.
    """

    group: ProcessGroup
    rank: int
    size: int
    sequence_parallel: bool
    random: RegionRandom = field(init=False)

    def __post_init__(self) -> None:
        self.random = RegionRandom(self.rank)

    def enter(self, x: Tensor) -> Tensor:
        """The hidden state, `[b, s/size, h]` or `[b, s, h]`, becomes whole: `[b, s, h]` on every rank."""
        if self.sequence_parallel:
            return collectives.gather_from_sequence(x, self.group)
        return collectives.copy_to_region(x, self.group)

    def leave(self, x: Tensor) -> Tensor:
        """Partial sums `[b, s, h]` become the hidden state: the sum, or this rank's shard of it along the sequence."""
        self.random.leave()
        if self.sequence_parallel:
            return collectives.scatter_to_sequence(x, self.group)
        return collectives.reduce_from_region(x, self.group)

    def own_part(self, x: Tensor) -> Tensor:
        """This rank's part along the sequence of an `x` that every rank has whole: `[b, s, h]` -> `[b, s/size, h]`."""
        collectives.check_divides(x, self.group, collectives.SEQUENCE_DIM)
        length = x.shape[collectives.SEQUENCE_DIM] // self.size
        return x.narrow(collectives.SEQUENCE_DIM, self.rank * length, length)

    def chunk(self, length: int) -> tuple[int, int]:
        """Start and size of this rank's slice of a dimension of `length`."""
        return even_chunk(length, self.size, self.rank)

    def widths(self, length: int) -> tuple[int, ...]:
        """The sizes of all ranks' slices of a dimension of `length`."""
        return tuple(even_chunk(length, self.size, rank)[1] for rank in range(self.size))

    def __deepcopy__(self, memo: dict[int, Any]) -> Region:
        """A copied model (a moving average, say) works in the same group; process groups cannot be copied."""
        return self
