"""How speed grows with the ranks: the best point of each size, against the smallest one times the ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hybrid_strategy.sweeping.points import Point


@dataclass(frozen=True)
class Measured:
    """A point that ended well, with its speed."""

    point: Point
    tokens_per_second: float


@dataclass(frozen=True)
class Size:
    """One number of ranks; `efficiency` is speed a rank over that of the smallest size."""

    ranks: int
    nodes: int
    name: str
    tokens_per_second: float
    forecast_tokens_per_second: float | None
    efficiency: float


@dataclass(frozen=True)
class Scaling:
    """A curve. `kind`: strong, the batch stays, or weak, it grows with the ranks."""

    kind: str
    what: str
    sizes: tuple[Size, ...]


def scalings(measured: Sequence[Measured]) -> list[Scaling]:
    """Every group of points of one batch, or of one batch a rank, that has two sizes at least."""
    found = []
    for kind, key, words in (("strong", _batch, "{} samples a step"), ("weak", _batch_per_rank, "{} samples a rank and step")):
        groups: dict[Any, list[Measured]] = {}
        for each in measured:
            value = key(each.point.facts)
            if value is not None:
                groups.setdefault(value, []).append(each)
        for value, group in sorted(groups.items()):
            sizes = _sizes(group)
            if len(sizes) > 1:
                found.append(Scaling(kind, words.format(f"{value:g}"), sizes))
    return found


def _batch(facts: Mapping[str, Any]) -> Any:
    return facts.get("global_batch_size")


def _batch_per_rank(facts: Mapping[str, Any]) -> Any:
    batch, ranks = facts.get("global_batch_size"), facts.get("world_size")
    return batch / ranks if batch and ranks else None


def _sizes(group: Sequence[Measured]) -> tuple[Size, ...]:
    best: dict[int, Measured] = {}
    for each in sorted(group, key=lambda each: each.tokens_per_second, reverse=True):
        best.setdefault(each.point.resources.world_size, each)
    smallest = best[min(best)]
    alone = smallest.tokens_per_second / smallest.point.resources.world_size
    return tuple(
        Size(
            ranks=ranks,
            nodes=each.point.resources.nodes,
            name=each.point.name,
            tokens_per_second=each.tokens_per_second,
            forecast_tokens_per_second=each.point.facts.get("forecast_tokens_per_second"),
            efficiency=each.tokens_per_second / ranks / alone,
        )
        for ranks, each in sorted(best.items())
    )
