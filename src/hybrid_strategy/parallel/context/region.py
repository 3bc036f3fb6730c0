"""The context-parallel ranks as one rank sees them, and what is going on there now."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed import ProcessGroup

from hybrid_strategy.errors import LayoutError, message
from hybrid_strategy.parallel.tensor.random import RegionRandom


@dataclass(eq=False)
class ContextRegion:
    """The context-parallel group of this rank.

    Attributes:
        group: the ranks among which sequences are cut.
        rank: this rank's index in `group`.
        size: number of ranks in `group`.
        tensor_group: under sequence parallelism the tensor-parallel ranks, which cut the part of a rank once more.
        random: this rank's random state within a unit, so that the parts of a sequence get other dropout masks.
        trying: a unit is being tried on a whole sequence, so nothing is cut.
        tried: signatures of units that have been.
        in_forward: does a user's step run its forward passes now?
    """

    group: ProcessGroup
    rank: int
    size: int
    tensor_group: ProcessGroup | None = None
    random: RegionRandom = field(init=False)
    trying: bool = False
    tried: set[Hashable] = field(default_factory=set)
    in_forward: Callable[[], bool] = lambda: False

    def __post_init__(self) -> None:
        self.random = RegionRandom(self.rank)

    @property
    def tensor_size(self) -> int:
        """Into how many parts sequence parallelism cuts the part of a rank."""
        return 1 if self.tensor_group is None else self.tensor_group.size()

    def check(self, length: int) -> None:
        """Refuses a sequence that cannot be cut evenly.

        Raises:
            LayoutError: on all ranks that work on the sequence.
        """
        parts = 2 * self.size
        if length % parts or length // self.size % self.tensor_size:
            needed = parts if self.tensor_size == 1 else f"{parts} and of {self.size * self.tensor_size} (sequence_parallel)"
            rule = "every sequence is cut into two equal chunks a rank"
            numbers = f"A micro-batch has sequences of {length} positions, which is not a multiple of {needed}"
            advice = "Pad the sequences (labels -100 do not count), or set another size"
            raise LayoutError(message("context_parallel_size", self.size, rule, numbers, advice))

    @contextmanager
    def own_random_numbers(self, wanted: bool, device: torch.device) -> Iterator[None]:
        """Each rank draws its own numbers meanwhile; afterwards all draw the same again."""
        if wanted:
            self.random.enter(device)
        try:
            yield
        finally:
            self.random.leave()

    def __deepcopy__(self, memo: dict[int, Any]) -> ContextRegion:
        """A copied model (a moving average, say) works in the same group; process groups cannot be copied."""
        return self
