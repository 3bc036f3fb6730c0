"""Which point is better: less loss; among losses that are equal within rounding, the faster one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf, isfinite
from typing import TypeVar

T = TypeVar("T")

SAME_LOSS = 1e-3
"""Relative difference below which two losses are taken to be the same: layouts differ in rounding only."""


def ranked(items: Sequence[T], loss: Callable[[T], float | None], speed: Callable[[T], float | None]) -> list[T]:
    """Best first.

    Args:
        loss: of an item; None, and what is not finite, counts as worse than any.
        speed: of an item; None, and what is not finite, counts as standing still.

    >>> ranked([(2.0, 10), (1.0, 5), (1.0005, 9), (None, 20)], lambda each: each[0], lambda each: each[1])
    [(1.0005, 9), (1.0, 5), (2.0, 10), (None, 20)]
    """

    def loss_of(item: T) -> float:
        value = loss(item)
        return value if value is not None and isfinite(value) else inf

    def speed_of(item: T) -> float:
        value = speed(item)
        return value if value is not None and isfinite(value) else 0.0

    made: list[T] = []
    group: list[T] = []
    for item in sorted(items, key=loss_of):
        if group and loss_of(item) > loss_of(group[0]) + SAME_LOSS * abs(loss_of(group[0])):
            made += sorted(group, key=speed_of, reverse=True)
            group = []
        group.append(item)
    return made + sorted(group, key=speed_of, reverse=True)
