"""Collects what was found about each quantity, and picks what differs first."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from hybrid_strategy.parity.clues import Clue
from hybrid_strategy.parity.files import CLIPPED, GRADIENTS, INITIAL, WEIGHTS
from hybrid_strategy.parity.report import Divergence, Row

OWNERS, LOSS, NORM, REPLICAS = "owners", "loss", "norm", "replicas"

WORDS = {
    INITIAL: "initial weights",
    OWNERS: "owners of the pieces",
    LOSS: "loss",
    NORM: "gradient norm",
    GRADIENTS: "gradients",
    CLIPPED: "clipped gradients",
    WEIGHTS: "weights after the step",
    REPLICAS: "replicas",
}
"""Quantities in the order in which one follows from the other."""

_ORDER = {kind: index for index, kind in enumerate(WORDS)}
_UNITS = {
    INITIAL: "bit for bit",
    OWNERS: "one rank for each element",
    LOSS: "relative",
    NORM: "relative",
    GRADIENTS: "of the largest gradient",
    CLIPPED: "of the largest gradient",
    WEIGHTS: "absolute, by what the gradients explain",
    REPLICAS: "of the largest",
}


@dataclass(frozen=True)
class Place:
    """Where a comparison was made: step (-1: before the first), quantity, index and name of the parameter."""

    step: int
    kind: str
    index: int = 0
    parameter: str | None = None

    @property
    def order(self) -> tuple[int, int, int]:
        return self.step, _ORDER[self.kind], self.index


@dataclass(frozen=True)
class Miss:
    """A comparison that failed."""

    place: Place
    difference: float
    allowed: float
    clue: Clue | None = None


@dataclass
class _Quantity:
    count: int = 0
    difference: float = 0.0
    allowed: float = 0.0
    share: float = -1.0


@dataclass
class Tally:
    """All comparisons of a check."""

    misses: list[Miss] = field(default_factory=list)
    _quantities: dict[str, _Quantity] = field(default_factory=dict)
    _telling: dict[tuple[int, str], int] = field(default_factory=dict)

    def add(self, kind: str, difference: float, allowed: float) -> None:
        """One comparison, good or bad; the row shows the one that lies worst in relation to what is allowed."""
        known = self._quantities.setdefault(kind, _Quantity())
        known.count += 1
        share = difference / allowed if allowed else (float("inf") if difference else 0.0)
        if share > known.share:
            known.share, known.difference, known.allowed = share, difference, allowed

    def miss(self, miss: Miss) -> None:
        """A comparison that failed; it counts as telling."""
        self.misses.append(miss)
        self.tell(miss.place)

    def tell(self, place: Place) -> None:
        """A tensor at this step and of this kind is large enough for a wrong factor to show."""
        key = (place.step, place.kind)
        self._telling[key] = self._telling.get(key, 0) + 1

    def telling(self, place: Place) -> int:
        """Tensors of this step and kind that are wrong, or right and large enough to tell."""
        return self._telling.get((place.step, place.kind), 0)

    def rows(self, num_steps: int) -> tuple[Row, ...]:
        """The verdict by quantity."""
        failed = {miss.place.kind for miss in self.misses}
        kinds = [kind for kind in WORDS if kind in self._quantities or kind in failed]
        return tuple(self._row(kind, num_steps, kind not in failed) for kind in kinds)

    def first(self) -> Miss | None:
        """What differs first."""
        return min(self.misses, key=lambda each: each.place.order, default=None)

    def at(self, step: int, kinds: Iterable[str]) -> list[Miss]:
        """All misses of a step and these kinds, in the model's order."""
        found = [miss for miss in self.misses if miss.place.step == step and miss.place.kind in set(kinds)]
        return sorted(found, key=lambda each: each.place.order)

    def divergence(self, miss: Miss) -> Divergence:
        """A miss for people."""
        place = miss.place
        names = {each.place.parameter for each in self.at(place.step, [place.kind])}
        quantity = WORDS[place.kind]
        return Divergence(place.step + 1, quantity, place.parameter, miss.difference, miss.allowed, len(names) - 1)

    def _row(self, kind: str, num_steps: int, same: bool) -> Row:
        known = self._quantities.get(kind, _Quantity())
        return Row(WORDS[kind], _compared(kind, known.count, num_steps), known.difference, known.allowed, _UNITS[kind], same)


def _compared(kind: str, count: int, num_steps: int) -> str:
    if kind in (INITIAL, OWNERS):
        return f"{count} tensors"
    if kind in (LOSS, NORM):
        return f"{num_steps} steps"
    return f"{count} tensors"
