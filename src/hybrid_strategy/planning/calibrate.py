"""Refits the coefficients of a cluster to measured steps: what `hybrid calibrate` writes into a `conf/cluster/*.yaml`.

Few runs say little about many coefficients, so each is held near its old value by a weight: what the runs do not tell stays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import hypot, log

from hybrid_strategy.planning.scenario import Scenario
from hybrid_strategy.planning.step_time import StepModel
from hybrid_strategy.spec.cluster import ClusterSpec

COEFFICIENTS = {
    "kernels.matmul_efficiency": (0.05, 1.0),
    "kernels.fp8_efficiency": (0.05, 1.0),
    "kernels.attention_efficiency": (0.02, 1.0),
    "kernels.memory_efficiency": (0.05, 1.0),
    "kernels.launch_seconds": (1e-7, 1e-3),
    "intra_node.efficiency": (0.02, 1.0),
    "inter_node.efficiency": (0.02, 1.0),
    "intra_node.latency_seconds": (1e-7, 1e-3),
}
"""What may be refitted, and within which bounds."""

ROUNDED = 0.02
"""Errors of a fit that are small."""

Values = dict[str, float]


@dataclass(frozen=True)
class Observation:
    """One run: what was run, and the median seconds of its step."""

    scenario: Scenario
    step_seconds: float


def coefficients(cluster: ClusterSpec) -> Values:
    """The coefficients of a cluster by their key, those that are 0 (no such unit or link) left out."""
    found = {}
    for key in COEFFICIENTS:
        group, name = key.split(".")
        value = float(getattr(getattr(cluster, group), name))
        if value > 0:
            found[key] = value
    return found


def with_coefficients(cluster: ClusterSpec, values: Mapping[str, float]) -> ClusterSpec:
    """The cluster with some of its coefficients replaced.

    >>> changed = with_coefficients(ClusterSpec(), {"kernels.matmul_efficiency": 0.5})
    >>> changed.kernels.matmul_efficiency, coefficients(changed)["kernels.matmul_efficiency"]
    (0.5, 0.5)
    """
    groups: dict[str, dict[str, float]] = {}
    for key, value in values.items():
        group, name = key.split(".")
        groups.setdefault(group, {})[name] = value
    return replace(cluster, **{group: replace(getattr(cluster, group), **changed) for group, changed in groups.items()})


def descend(
    loss: Callable[[Values], float], start: Values, bounds: Mapping[str, tuple[float, float]], rounds: int = 6, step: float = 0.1
) -> Values:
    """The values for which `loss` is least, one at a time up or down by a share that shrinks with each round.

    >>> found = descend(lambda values: (values["x"] - 3) ** 2, {"x": 1.0}, {"x": (0.1, 9.0)}, rounds=12)
    >>> round(found["x"], 1)
    3.0
    """
    values, best = dict(start), loss(start)
    for _ in range(rounds):
        for key in values:
            for share in (1 + step, 1 / (1 + step)):
                while True:
                    low, high = bounds[key]
                    tried = {**values, key: min(high, max(low, values[key] * share))}
                    found = loss(tried)
                    if found >= best - 1e-9:
                        break
                    values, best = tried, found
        step *= 0.6
    return values


def fit_loss(errors: Iterable[float], values: Values, start: Values, pull: float) -> float:
    """Mean |log(forecast / measured)|, no run counting more than 0.4, and the pull towards the old values.

    Errors of less than `ROUNDED` count by their square: on an edge of |x| no value can move alone without a loss, so that a
    descent by one at a time would stay where some runs are met exactly and the others are not.
    """
    sizes = [min(hypot(error, ROUNDED) - ROUNDED, 0.4) for error in errors]
    away = sum(log(values[key] / start[key]) ** 2 for key in values)
    return sum(sizes) / max(1, len(sizes)) + pull * away


def calibrate(cluster: ClusterSpec, observations: Sequence[Observation], pull: float = 0.02) -> ClusterSpec:
    """The cluster refitted to `observations`, marked as measured.

    Args:
        pull: how firmly a coefficient stays where it was: a factor of 2 costs as much as a mean error of half of this.
    """
    start = coefficients(cluster)
    if not observations:
        return cluster

    def loss(values: Values) -> float:
        errors = (log(_forecast(each.scenario, start, values) / each.step_seconds) for each in observations)
        return fit_loss(errors, values, start, pull)

    return replace(with_coefficients(cluster, descend(loss, start, COEFFICIENTS)), measured=True)


def _forecast(scenario: Scenario, start: Values, values: Values) -> float:
    """The step under changed coefficients; a run's own may differ from the cluster's (shared cores), so they change in ratio."""
    own = coefficients(scenario.cluster)
    changed = {key: own[key] * values[key] / start[key] for key in values if key in own}
    return StepModel(replace(scenario, cluster=with_coefficients(scenario.cluster, changed))).step_time(play=False).step_seconds
