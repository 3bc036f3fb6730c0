"""The sample of the grid: every pair occurs, refused points count only where nothing else can, a seed is a sample."""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = str(Path(__file__).resolve().parents[2] / "benchmarks")


@pytest.fixture(scope="module")
def points() -> ModuleType:
    sys.path.insert(0, BENCHMARKS)
    try:
        import grid_points
    finally:
        sys.path.remove(BENCHMARKS)
    return grid_points


def _factors(points: ModuleType):
    levels = {"a": ("none", "2", "4"), "b": ("none", "2", "4"), "c": ("x", "y", "z"), "d": ("x", "y")}
    processes = {(name, level): int(level) for name in "ab" for level in ("2", "4")}
    return points.Factors(levels, processes, 8)


def test_every_pair_that_fits_occurs(points: ModuleType) -> None:
    factors = _factors(points)
    wanted = factors.pairs()
    assert (("a", "4"), ("b", "4")) not in wanted
    chosen = list(points.sample(factors, 0, lambda point: False))
    assert set().union(*(points.pairs_of(point, factors) for point, _ in chosen)) >= wanted
    assert set().union(*(new for _, new in chosen)) == wanted
    assert sum(len(new) for _, new in chosen) == len(wanted)
    assert len(chosen) < 20
    assert all(factors.size(point.items()) <= 8 for point, _ in chosen)


def test_refused_points_cover_only_what_is_always_refused(points: ModuleType) -> None:
    factors = _factors(points)

    def refused(point: dict[str, str]) -> bool:
        return point["c"] == "z" and point["d"] == "y"

    chosen = list(points.sample(factors, 1, refused))
    tested = set().union(*(points.pairs_of(point, factors) for point, _ in chosen if not refused(point)))
    assert factors.pairs() - tested == {(("c", "z"), ("d", "y"))}


def test_a_seed_is_a_sample(points: ModuleType) -> None:
    factors = _factors(points)
    samples = [[point for point, _ in points.sample(factors, seed, lambda point: False)] for seed in (0, 0, 1)]
    assert samples[0] == samples[1] != samples[2]
    assert all(left != right for left, right in pairwise(samples[0]))
