from __future__ import annotations

from dataclasses import replace

import pytest

from hybrid_strategy.planning.calibrate import Observation, calibrate, coefficients, with_coefficients
from hybrid_strategy.planning.scenario import Scenario
from hybrid_strategy.planning.step_time import StepModel
from hybrid_strategy.spec.batch import BatchSpec
from hybrid_strategy.spec.cluster import ClusterSpec
from hybrid_strategy.spec.layout import Layout
from hybrid_strategy.spec.model_shape import ModelShape

SHAPE = ModelShape(2048, 16, 16, 8192, 32000, 1024)
LAYOUTS = (
    Layout(data_parallel_size=8),
    Layout(data_parallel_size=2, tensor_parallel_size=4),
    Layout(data_parallel_size=4, pipeline_parallel_size=2),
    Layout(data_parallel_size=8, sharding="zero3", activation_checkpoint="full"),
)


def observations(cluster: ClusterSpec, told: ClusterSpec) -> list[Observation]:
    """Steps of a machine like `cluster`, whose scenarios still name the cluster they were `told`."""
    found = []
    for layout in LAYOUTS:
        scenario = Scenario(SHAPE, layout, BatchSpec(64, num_microbatches=4), cluster)
        seconds = StepModel(scenario).step_time(play=False).step_seconds
        found.append(Observation(replace(scenario, cluster=told), seconds))
    return found


def errors(cluster: ClusterSpec, seen: list[Observation]) -> list[float]:
    return [
        StepModel(replace(each.scenario, cluster=cluster)).step_time(play=False).step_seconds / each.step_seconds - 1
        for each in seen
    ]


def test_a_slower_machine_is_found() -> None:
    told = ClusterSpec()
    slower = with_coefficients(told, {"kernels.matmul_efficiency": 0.4, "intra_node.efficiency": 0.3})
    seen = observations(slower, told)
    assert max(map(abs, errors(told, seen))) > 0.2
    fitted = calibrate(told, seen)
    assert max(map(abs, errors(fitted, seen))) < 0.03
    assert fitted.measured
    assert fitted.kernels.matmul_efficiency == pytest.approx(0.4, rel=0.05)


def test_a_machine_as_told_stays() -> None:
    told = ClusterSpec()
    fitted = calibrate(told, observations(told, told))
    assert coefficients(fitted) == pytest.approx(coefficients(told), rel=0.01)


def test_without_runs_nothing_changes() -> None:
    told = ClusterSpec()
    assert calibrate(told, []) is told
    assert "kernels.fp8_efficiency" in coefficients(told)
