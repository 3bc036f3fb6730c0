"""Which columns of the vocabulary each tensor-parallel rank holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.distributed import ProcessGroup


@dataclass(frozen=True, eq=False)
class VocabSpan:
    """Rank `rank` of `group` holds `widths[rank]` columns of the vocabulary, the ranks' columns stand one after another."""

    group: ProcessGroup
    rank: int
    widths: tuple[int, ...]

    @property
    def start(self) -> int:
        """The first column of this rank."""
        return sum(self.widths[: self.rank])

    @property
    def width(self) -> int:
        """How many columns this rank holds."""
        return self.widths[self.rank]

    @property
    def vocab_size(self) -> int:
        return sum(self.widths)

    def __deepcopy__(self, memo: dict[int, Any]) -> VocabSpan:
        """A copied model works in the same group; process groups cannot be copied."""
        return self
