"""The memory ledger: every byte of one rank, by line, with the formula and the source of each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

LEDGER_CATEGORIES = (
    "parameters",
    "gradients",
    "optimizer",
    "copies",
    "activations",
    "logits",
    "gathered",
    "buffers",
    "reserve",
)
"""Kinds of lines, in the order shown. `copies`: fp32 masters and 16-bit casts; `gathered`: un-sharded ZeRO units."""


@dataclass(frozen=True)
class LedgerLine:
    """One term of the ledger. `formula` has the numbers filled in; `source` is a paper's equation or an upstream file."""

    name: str
    category: str
    bytes: float
    formula: str
    source: str


@dataclass(frozen=True)
class MemoryLedger:
    """What one rank of pipeline rank `pipeline_rank` holds at its peak, against what the GPU has."""

    pipeline_rank: int
    stages: tuple[int, ...]
    lines: tuple[LedgerLine, ...]
    memory_bytes: float

    @cached_property
    def total_bytes(self) -> float:
        return sum([line.bytes for line in self.lines])

    @property
    def allocated_bytes(self) -> float:
        """What the allocator hands out: the total without the reserve."""
        return sum(line.bytes for line in self.lines if line.category != "reserve")

    @property
    def fits(self) -> bool:
        return self.total_bytes <= self.memory_bytes

    @property
    def by_category(self) -> Mapping[str, float]:
        """Bytes of each category that has any, in the order of `LEDGER_CATEGORIES`."""
        sums = dict.fromkeys(LEDGER_CATEGORIES, 0.0)
        for line in self.lines:
            sums[line.category] += line.bytes
        return {category: value for category, value in sums.items() if value}

    def of(self, *categories: str) -> float:
        """Bytes of the given categories together."""
        return sum(line.bytes for line in self.lines if line.category in categories)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "pipeline_rank": self.pipeline_rank,
            "stages": list(self.stages),
            "total_bytes": self.total_bytes,
            "memory_bytes": self.memory_bytes,
            "by_category": dict(self.by_category),
            "lines": [vars(line) for line in self.lines],
        }


def largest(ledgers: Iterable[MemoryLedger]) -> MemoryLedger:
    """The ledger of the rank that holds most."""
    return max(ledgers, key=lambda ledger: ledger.total_bytes)
