"""Ways to cut a model into stages, and what one of them gains over another: units that move, and the step that follows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from hybrid_strategy.planning.balance import balance, layer_like
from hybrid_strategy.planning.simulate import PassCosts, simulate
from hybrid_strategy.spec.table import ScheduleTable

BACKWARD_SHARE = 2.0
"""A backward pass over its forward pass: two products for one."""


@dataclass(frozen=True)
class Cut:
    """One way to cut.

    Attributes:
        name: by what: `uniform`, `counted`, `measured`.
        stage_cuts: first unit of every stage but the first.
        step_seconds: of the schedule, played with the measured costs.
    """

    name: str
    stage_cuts: tuple[int, ...]
    step_seconds: float


def stage_costs(costs: Sequence[float], stage_cuts: Sequence[int]) -> list[float]:
    """The costs of each stage.

    >>> stage_costs([1, 1, 1, 3], [3])
    [3, 3]
    """
    bounds = (0, *stage_cuts, len(costs))
    return [sum(costs[first:last]) for first, last in pairwise(bounds)]


def played_seconds(table: ScheduleTable, seconds: Sequence[float], stage_cuts: Sequence[int]) -> float:
    """The schedule with each stage's passes as long as its units are together; `seconds`: both passes of each unit."""
    costs = {}
    for stage, whole in enumerate(stage_costs(seconds, stage_cuts)):
        forward = whole / (1 + BACKWARD_SHARE)
        backward = whole - forward
        costs[stage] = {"F": forward, "B": backward, "I": backward / 2, "W": backward / 2}
    return simulate(table, PassCosts(costs, default_send_seconds=0.0)).makespan_seconds


def cut_by(names: Sequence[str], counted: Sequence[float], measured: Sequence[float], table: ScheduleTable) -> list[Cut]:
    """The uniform, the counted and the measured cut, each with the step that the measured costs give it."""
    layers = layer_like(names)
    ways = {"uniform": [float(each) for each in layers], "counted": list(counted), "measured": list(measured)}
    found = []
    for name, costs in ways.items():
        cuts = balance(costs, table.num_stages, layers)
        found.append(Cut(name, cuts, played_seconds(table, measured, cuts)))
    return found


def moves(names: Sequence[str], before: Sequence[int], after: Sequence[int]) -> list[str]:
    """Units that change their stage from one cut to another.

    >>> moves(["embed", "layers.0", "layers.1", "head"], [2], [3])
    ['layers.1 moves from stage 1 to 0']
    """
    first, second = _stages(len(names), before), _stages(len(names), after)
    pairs = zip(names, first, second, strict=True)
    return [f"{name} moves from stage {old} to {new}" for name, old, new in pairs if old != new]


def _stages(count: int, stage_cuts: Sequence[int]) -> list[int]:
    return [sum(unit >= cut for cut in stage_cuts) for unit in range(count)]
