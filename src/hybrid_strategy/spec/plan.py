"""The plan: layout and everything decided from it. Frozen; stored as plan.json; both planner and engine speak of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from hybrid_strategy.spec.batch import BatchSpec
from hybrid_strategy.spec.layout import Layout


@dataclass(frozen=True)
class Plan:
    """What a run will do. `stage_units[s]` names the units of stage `s`; `rank_parameters[r]` counts rank `r`'s parameters."""

    layout: Layout
    batch: BatchSpec
    bubble_fraction: float
    stage_units: tuple[tuple[str, ...], ...] = ()
    rank_parameters: tuple[int, ...] = ()
    num_parameters: int = 0
    learning_rate: float | None = None
    reasons: tuple[str, ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, strings, lists and dicts, ready for JSON."""
        return asdict(self)
