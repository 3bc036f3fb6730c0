"""What a tensor that differs tells: by which factor, on which ranks, and whether copies of it have come apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import torch
from torch import Tensor

from hybrid_strategy.parity.records import Piece, Whole, distance
from hybrid_strategy.spec.layout import Coordinate, Layout

_AXES = {
    "tensor_parallel": "tensor-parallel",
    "context_parallel": "context-parallel",
    "data_parallel_shard": "data-parallel",
    "data_parallel_replicate": "data-parallel",
    "pipeline_parallel": "pipeline",
}


@dataclass(frozen=True)
class Clue:
    """One tensor that differs.

    Attributes:
        ratio: the factor of got to wanted that fits best; `None` where there is too little of it to tell.
        constant: after division by `ratio` the tensor is right.
        absent: no rank has it, or a part of it, while one process has.
        extra: one process has none of it.
        dtypes: its type in the layout and in one process, where they differ.
        owners: the least and the largest number of ranks that own an element, where it is not one.
        zero: it is all zeros while one process's is not.
        wrong_ranks: ranks that hold a wrong element, where other ranks hold only right ones.
        apart: axes along which ranks that hold the same elements disagree.
        sum_is_right: the sum over such ranks is what one process has.
        mean_is_right: their mean is.
    """

    name: str
    ratio: float | None = None
    constant: bool = False
    absent: bool = False
    extra: bool = False
    dtypes: tuple[str, str] | None = None
    owners: tuple[int, int] | None = None
    zero: bool = False
    wrong_ranks: tuple[int, ...] = ()
    apart: tuple[str, ...] = ()
    sum_is_right: bool = False
    mean_is_right: bool = False


@dataclass(frozen=True)
class Fit:
    """The factor `ratio` by which a tensor fits another best; `error` is the standard error of it were the rest noise."""

    ratio: float
    error: float
    rest: float


def fit(got: Tensor, want: Tensor) -> Fit | None:
    """Least squares of `got = ratio * want`; `None` where `want` is nothing. `rest`: the largest element that is left over.

    >>> found = fit(torch.tensor([2.0, 4.0]), torch.tensor([1.0, 2.0]))
    >>> found.ratio, found.rest
    (2.0, 0.0)
    """
    left, right = got.double().flatten(), want.double().flatten()
    power = float(right @ right)
    if power == 0.0 or not bool(left.isfinite().all() and right.isfinite().all()):
        return None
    ratio = float(left @ right) / power
    rest = left - ratio * right
    error = float(rest.norm()) / (power * len(right)) ** 0.5
    return Fit(ratio, error, float(rest.abs().max()))


def clue_of(got: Whole, want: Tensor, bound: float | Tensor, layout: Layout) -> Clue:
    """What is wrong with `got`; elements may differ by `bound`, one for all or one for each."""
    if got.value is None or not got.is_complete:
        return Clue(got.name, absent=True, wrong_ranks=tuple(sorted({each.rank for each in got.pieces if each.value is None})))
    bounds = torch.as_tensor(bound, dtype=torch.float64).expand(want.shape)
    found = fit(got.value, want)
    wrong, right = _by_rank(got.pieces, want, bounds)
    apart, groups = _apart(got.pieces, bounds, layout)
    return Clue(
        got.name,
        ratio=found.ratio if found else None,
        constant=found is not None and found.rest <= float(bounds.max()) * max(1.0, abs(found.ratio)),
        zero=not bool(got.value.any()) and bool(want.any()),
        wrong_ranks=wrong if right else (),
        apart=apart,
        sum_is_right=bool(groups) and all(_combined(group, want, bounds, 1.0) for group in groups),
        mean_is_right=bool(groups) and all(_combined(group, want, bounds, 1.0 / len(group)) for group in groups),
    )


def beyond(left: Tensor, right: Tensor, bounds: Tensor) -> bool:
    """Is any element further away than its bound?"""
    return bool((distance(left, right) > bounds).any())


def _by_rank(pieces: Sequence[Piece], want: Tensor, bounds: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Ranks whose piece has a wrong element, and ranks whose piece has none."""
    wrong: list[int] = []
    right: list[int] = []
    for piece in pieces:
        if piece.value is not None and piece.value.numel():
            where = piece.spec.slices
            (wrong if beyond(piece.value, want[where], bounds[where]) else right).append(piece.rank)
    return tuple(wrong), tuple(right)


def _apart(pieces: Sequence[Piece], bounds: Tensor, layout: Layout) -> tuple[tuple[str, ...], list[list[Piece]]]:
    """Axes along which copies disagree, and the groups of ranks along the first of them."""
    axes: dict[str, list[list[Piece]]] = {}
    for axis, word in _AXES.items():
        groups = _groups(pieces, axis, layout)
        split = [group for group in groups if any(_differ(a, b, bounds) for a, b in combinations(group, 2))]
        if split:
            axes.setdefault(word, split)
    return tuple(axes), next(iter(axes.values()), [])


def _groups(pieces: Sequence[Piece], axis: str, layout: Layout) -> list[list[Piece]]:
    """Pieces of the same block on ranks that differ along `axis` only."""
    groups: dict[object, list[Piece]] = {}
    for piece in pieces:
        if piece.value is not None and piece.value.numel():
            key = (_without(layout.coordinate(piece.rank), axis), piece.spec.offsets, piece.spec.sizes)
            groups.setdefault(key, []).append(piece)
    return [group for group in groups.values() if len(group) > 1]


def _without(coordinate: Coordinate, axis: str) -> tuple[int, ...]:
    return tuple(getattr(coordinate, name) for name in _AXES if name != axis)


def _differ(left: Piece, right: Piece, bounds: Tensor) -> bool:
    if left.value is None or right.value is None:
        return False
    return beyond(left.value, right.value, bounds[left.spec.slices])


def _combined(group: Sequence[Piece], want: Tensor, bounds: Tensor, factor: float) -> bool:
    """Is `factor` times the sum over the group right?"""
    values = torch.stack([piece.value.double() for piece in group if piece.value is not None])
    where = group[0].spec.slices
    return not beyond(factor * values.sum(0), want[where], bounds[where])
