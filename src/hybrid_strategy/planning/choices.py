"""Values of an axis: the nearest valid ones for the advice of a refusal, and those worth trying."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import islice

SHOWN = 6


CHUNK = 4096
"""The fewest positions of a chunk of a sequence for which context parallelism is tried where it is not asked for."""


@lru_cache(maxsize=4096)
def divisors(number: int) -> tuple[int, ...]:
    """All divisors, ascending.

    >>> divisors(12)
    (1, 2, 3, 4, 6, 12)
    """
    small = [each for each in range(1, math.isqrt(number) + 1) if number % each == 0]
    return (*small, *(number // each for each in reversed(small) if each * each != number))


def one_of(values: Iterable[object]) -> str:
    """A list for people.

    >>> one_of([1, 2, 4, 8]), one_of([3])
    ('1, 2, 4 or 8', '3')
    """
    words = [str(value) for value in values]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def nearest(values: Iterable[int], wanted: int, count: int = SHOWN) -> list[int]:
    """The `count` values nearest to `wanted` by ratio, ascending.

    >>> nearest([1, 2, 4, 8, 16, 32, 64], 12, count=3)
    [8, 16, 32]
    """
    return sorted(sorted(values, key=lambda each: (abs(math.log(each / max(wanted, 1))), each))[:count])


def nearest_multiples(number: int, multiple: int) -> list[int]:
    """The multiples of `multiple` on both sides of `number`, none below one.

    >>> nearest_multiples(10, 4), nearest_multiples(3, 8)
    ([8, 12], [8])
    """
    below = number // multiple * multiple
    return [each for each in (below, below + multiple) if each > 0]


def alone(sizes: Mapping[str, int], key: str, target: int, exact: bool) -> list[int]:
    """Values of `key` that repair the product of `sizes` while the others stay.

    Args:
        sizes: factors by name.
        key: the factor that may change.
        target: what the product must equal (`exact`) or divide.
        exact: equal, not divide.

    >>> alone({"a": 2, "b": 3}, "b", 8, exact=True), alone({"a": 2, "b": 3}, "b", 8, exact=False)
    ([4], [1, 2, 4])
    """
    others = math.prod(size for name, size in sizes.items() if name != key)
    if target % others:
        return []
    return [target // others] if exact else list(divisors(target // others))


def together(
    sizes: Mapping[str, int], target: int, exact: bool, allowed: Callable[[Mapping[str, int]], bool], count: int = 3
) -> list[dict[str, int]]:
    """The nearest allowed sets of sizes, all free, whose product equals (`exact`) or divides `target`; sizes of 1 stay.

    >>> together({"a": 3, "b": 3, "c": 1}, 8, exact=True, allowed=lambda each: True, count=2)
    [{'a': 2, 'b': 4}, {'a': 4, 'b': 2}]
    """
    names = [name for name, size in sizes.items() if size > 1]
    found = [
        (round(sum(abs(math.log(value / sizes[name])) for name, value in zip(names, values, strict=True)), 9), values)
        for values in _factorisations(target, len(names), exact)
    ]
    sets = (dict(zip(names, values, strict=True)) for _, values in sorted(found))
    return list(islice((each for each in sets if allowed(each)), count))


def _factorisations(target: int, count: int, exact: bool) -> Iterator[tuple[int, ...]]:
    """All tuples of `count` numbers whose product equals (`exact`) or divides `target`."""
    if count == 0:
        if target == 1 or not exact:
            yield ()
        return
    for first in divisors(target):
        for rest in _factorisations(target // first, count - 1, exact):
            yield (first, *rest)


def context_sizes(processes: int, sequence_length: int) -> list[int]:
    """Context-parallel sizes worth trying: with chunks shorter than this, attention waits for keys and values.

    >>> context_sizes(64, 8192), context_sizes(64, 32768)
    ([1], [1, 2, 4])
    """
    fits = [size for size in divisors(processes) if sequence_length % (2 * size) == 0 and sequence_length // (2 * size) >= CHUNK]
    return [1, *(size for size in fits if size > 1)]
