"""Loss curves of a sweep by tokens, and the band in which they lie where nothing but the layout differs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hybrid_strategy.sweeping.metrics import read_rows, series
from hybrid_strategy.sweeping.points import Point
from hybrid_strategy.sweeping.ranking import SAME_LOSS

XY = tuple[float, float]

_LAYOUT_ONLY = ("strategy", "cluster", "hydra", "logger", "callbacks", "trainer.accelerator", "trainer.devices")
"""Keys that change how a step is computed, not what."""

_SAME = ("tokens_per_step", "seed", "num_parameters", "precision", "learning_rate")
_COARSE = 10.0
"""Half precision rounds more: its band is so many times wider."""


@dataclass(frozen=True)
class Curve:
    """Training loss of a point; x is tokens where they are known of every point, else steps."""

    name: str
    points: tuple[XY, ...]


@dataclass(frozen=True)
class Band:
    """Around the reference point's curve. `outside`: name and largest relative difference of the curves that leave it."""

    reference: str
    tolerance: float
    points: tuple[tuple[float, float, float], ...]
    inside: int
    outside: tuple[tuple[str, float], ...]


def curves_of(points: Sequence[Point], most: int = 200) -> tuple[list[Curve], bool]:
    """The curves, and whether they are by tokens. At most `most` places of each are kept."""
    by_tokens = all(point.facts.get("tokens_per_step") for point in points)
    found = []
    for point in points:
        rows = read_rows(point.folder)
        name = _training_loss([name for row in rows for name in row])
        factor = float(point.facts["tokens_per_step"]) if by_tokens else 1.0
        values = [((step + 1) * factor, loss) for step, loss in series(rows, name)] if name else []
        values = [each for each in values if each[1] == each[1] and abs(each[1]) != float("inf")]
        if values:
            found.append(Curve(point.name, tuple(_thinned(values, most))))
    return found, by_tokens


def comparable(points: Sequence[Point]) -> str:
    """Why the losses need not agree; empty where they must."""
    facts: list[Mapping[str, Any]] = [point.facts for point in points]
    for name in _SAME:
        if len({each.get(name) for each in facts}) > 1:
            return f"{name.replace('_', ' ')} is swept"
    for key in {key for point in points for key in point.swept}:
        plain = key.lstrip("+").replace("/", ".")
        if not plain.startswith(_LAYOUT_ONLY) and len({point.swept.get(key) for point in points}) > 1:
            return f"{plain} is swept"
    return ""


def band_of(points: Sequence[Point], curves: Sequence[Curve]) -> Band | None:
    """The band around the point on the fewest ranks; None where there are fewer than two curves."""
    known = {curve.name: curve for curve in curves}
    having = [point for point in points if point.name in known]
    if len(having) < 2:
        return None
    first = min(having, key=lambda point: (point.resources.world_size, point.facts.get("layout") or ""))
    reference, half = known[first.name], first.facts.get("precision") not in (None, "fp32", "32-true", "64-true")
    tolerance = SAME_LOSS * (_COARSE if half else 1.0)
    found = [(curve.name, _largest_difference(curve, reference)) for curve in curves if curve.name != first.name]
    outside = tuple((name, off) for name, off in found if abs(off) > tolerance)
    area = tuple((x, y - abs(y) * tolerance, y + abs(y) * tolerance) for x, y in reference.points)
    return Band(first.name, tolerance, area, len(found) - len(outside), outside)


def differences(curve: Curve, reference: Curve) -> tuple[XY, ...]:
    """Of the curve from the reference, as a fraction of it, at the places that both have."""
    known = dict(reference.points)
    return tuple((x, y / known[x] - 1) for x, y in curve.points if known.get(x))


def _largest_difference(curve: Curve, reference: Curve) -> float:
    return max((off for _, off in differences(curve, reference)), key=abs, default=0.0)


def _training_loss(names: Sequence[str]) -> str:
    found = {name for name in names if name and "loss" in name and not name.startswith(("val", "test"))}
    return min(sorted(found), key=len) if found else ""


def _thinned(values: list[XY], most: int) -> list[XY]:
    """Evenly spread places with the last one; the same places for curves of the same length."""
    if len(values) <= most:
        return values
    step = (len(values) - 1) / (most - 1)
    return [values[round(index * step)] for index in range(most)]
