"""The verdict of a check, as plain data."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from hybrid_strategy.errors import ParityError


@dataclass(frozen=True)
class Row:
    """One quantity over all steps.

    Attributes:
        quantity: what was compared.
        compared: how much of it, in words.
        difference: the largest, in the unit of `allowed`; at the place that lies worst in relation to what is allowed there.
        allowed: the bound there.
        unit: what both are relative to.
        same: within the bound everywhere.
    """

    quantity: str
    compared: str
    difference: float
    allowed: float
    unit: str
    same: bool


@dataclass(frozen=True)
class Divergence:
    """The first place where the layout leaves one process. `step` counts from 1; 0 is before the first step."""

    step: int
    quantity: str
    parameter: str | None
    difference: float
    allowed: float
    also: int = 0

    def __str__(self) -> str:
        where = f" of {self.parameter}" if self.parameter else ""
        more = f" (and {self.also} more)" if self.also else ""
        when = f"step {self.step}" if self.step else "before the first step"
        return f"{when}: {self.quantity}{where}{more}: {self.difference:.3g} apart, {self.allowed:.3g} allowed"


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    return [_finite(each) for each in value] if isinstance(value, (list, tuple)) else value


@dataclass(frozen=True)
class ParityReport:
    """What a check found.

    Attributes:
        layout: short name of the layout.
        settings: what was compared with what, for people.
        rows: verdict by quantity.
        first: where the layout first leaves one process; `None`: nowhere.
        diagnoses: likely causes, the surest first.
        notes: what else should be known.
        reason: why the bounds are what they are.
    """

    layout: str
    settings: str
    steps: int
    num_tensors: int
    rows: tuple[Row, ...]
    first: Divergence | None = None
    diagnoses: tuple[str, ...] = ()
    notes: tuple[str, ...] = field(default=())
    reason: str = ""

    @property
    def same(self) -> bool:
        """The layout gives the numbers of one process."""
        return self.first is None and all(row.same for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        """Plain containers, for JSON: what is not finite is a word."""
        values: dict[str, Any] = _finite({"same": self.same, **asdict(self)})
        return values

    def __str__(self) -> str:
        if self.same:
            return f"{self.layout} ({self.settings}) gives the numbers of one process in {self.steps} steps"
        return "\n".join(
            [f"{self.layout} ({self.settings}) differs from one process", str(self.first), *self.diagnoses, *self.notes]
        )

    def raise_if_different(self) -> ParityReport:
        """Returns itself.

        Raises:
            ParityError: the numbers differ.
        """
        if not self.same:
            raise ParityError(str(self))
        return self
