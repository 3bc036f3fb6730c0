"""What is expected of a configured run."""

from __future__ import annotations

from hybrid_strategy.config.machine import LOCAL, cluster_of
from hybrid_strategy.config.plan import RunPlan
from hybrid_strategy.config.question import why_not
from hybrid_strategy.config.settings import RunConfig
from hybrid_strategy.config.targets import numerics_of_run, trained_shape_of
from hybrid_strategy.planning.forecast import Forecast, forecast
from hybrid_strategy.planning.scenario import Scenario, planned_scenario


def scenario_of(config: RunConfig, planned: RunPlan) -> Scenario | None:
    """The run as the planner sees it; None where the sizes of its model or its batch are not known."""
    shape = trained_shape_of(config)
    if shape is None or why_not(config):
        return None
    numerics = numerics_of_run(config)
    return planned_scenario(planned.plan, shape, cluster_of(config, planned.world), numerics)


def forecast_of(config: RunConfig, planned: RunPlan) -> Forecast | None:
    """The forecast of the run; None where the sizes of its model or its batch are not known."""
    scenario = scenario_of(config, planned)
    return None if scenario is None else forecast(scenario)


def doubt_of(config: RunConfig, planned: RunPlan) -> str:
    """Why a forecast of this run is not to be relied on; empty for machines that were measured or whose figures are published."""
    cluster = cluster_of(config, planned.world)
    unknown = cluster.name == LOCAL and not cluster.measured
    return "the forecast is a guess until hybrid doctor has measured this machine" if unknown else ""


def expected(config: RunConfig, planned: RunPlan) -> dict[str, float] | None:
    """The values of the forecast that a run measures too.

    A GPU's memory is compared by what the allocator has handed out; a processor's process is measured as a whole.
    """
    found = forecast_of(config, planned)
    if found is None:
        return None
    ledger, on_gpu = found.ledger, planned.world.accelerator != "cpu"
    return {
        "step_seconds": found.step_seconds,
        "tokens_per_second": found.tokens_per_second_per_gpu * planned.world.size,
        "peak_memory_bytes": ledger.allocated_bytes if on_gpu else ledger.total_bytes,
        "bubble_fraction": found.step.bubble_fraction,
    }
