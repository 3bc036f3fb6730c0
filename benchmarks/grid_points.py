"""The grid of layouts and settings, and a sample of it in which every pair of levels of two factors occurs."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations

Point = dict[str, str]
"""Factor -> level."""

Pair = tuple[tuple[str, str], tuple[str, str]]

_TRIES = 40


@dataclass(frozen=True)
class Factors:
    """What is varied, and how many processes a level needs.

    Attributes:
        levels: factor -> its levels, in words.
        processes: (factor, level) -> its share of the number of processes, where it is not 1.
        max_processes: points that need more do not exist.
    """

    levels: Mapping[str, tuple[str, ...]]
    processes: Mapping[tuple[str, str], int]
    max_processes: int

    def size(self, items: Iterable[tuple[str, str]]) -> int:
        """Processes of a point, or of a part of one."""
        product = 1
        for item in items:
            product *= self.processes.get(item, 1)
        return product

    def pairs(self) -> set[Pair]:
        """All pairs of levels that fit the number of processes."""
        found: set[Pair] = set()
        for left, right in combinations(self.levels, 2):
            for one in self.levels[left]:
                for other in self.levels[right]:
                    pair = ((left, one), (right, other))
                    if self.size(pair) <= self.max_processes:
                        found.add(pair)
        return found


def pairs_of(point: Mapping[str, str], factors: Factors) -> set[Pair]:
    """The pairs that a point covers."""
    items = [(name, point[name]) for name in factors.levels]
    return set(combinations(items, 2))


def sample(factors: Factors, seed: int, refused: Callable[[Point], bool]) -> Iterator[tuple[Point, set[Pair]]]:
    """Points until every pair has occurred, each with the pairs that are new in it; the same for the same seed.

    A refused point tests nothing but its refusal, so a pair counts as covered by one only where no point that is not refused has
    been found for it.
    """
    generator = random.Random(seed)
    missing = factors.pairs()
    while missing:
        pair = generator.choice(sorted(missing))
        candidates = [_complete(dict(pair), factors, missing, generator) for _ in range(_TRIES)]
        good = [point for point in candidates if not refused(point)]
        if good:
            point = max(good, key=lambda each: len(pairs_of(each, factors) & missing))
            new = pairs_of(point, factors) & missing
        else:
            point, new = candidates[0], {pair}
        missing -= new
        yield point, new


def _complete(start: Point, factors: Factors, missing: set[Pair], generator: random.Random) -> Point:
    """Fills the other factors, in random order, each with a level that makes many missing pairs."""
    point = dict(start)
    rest = [name for name in factors.levels if name not in point]
    generator.shuffle(rest)
    for name in rest:
        fitting = [
            level for level in factors.levels[name] if factors.size([*point.items(), (name, level)]) <= factors.max_processes
        ]
        gains = [sum(_pair(factors, item, (name, level)) in missing for item in point.items()) for level in fitting]
        best = max(gains)
        # now and then a level at random: a greedy choice keeps running into the same refusals
        wanted = [level for level, gain in zip(fitting, gains, strict=True) if gain == best or generator.random() < 0.2]
        point[name] = generator.choice(wanted)
    return {name: point[name] for name in factors.levels}


def _pair(factors: Factors, left: tuple[str, str], right: tuple[str, str]) -> Pair:
    order = list(factors.levels)
    return (left, right) if order.index(left[0]) < order.index(right[0]) else (right, left)
