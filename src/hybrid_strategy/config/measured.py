"""From finished runs to observations, and from them to refitted machines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

from omegaconf import OmegaConf

from hybrid_strategy.config.forecasting import scenario_of
from hybrid_strategy.config.machine import LOCAL, Machine, machine_file, read_machine, shared, write_machine
from hybrid_strategy.config.plan import plan_of
from hybrid_strategy.config.settings import RunConfig
from hybrid_strategy.config.storage import CONFIG_FILE, RESULT_FILE, read_config
from hybrid_strategy.errors import ConfigError, message
from hybrid_strategy.files import read_json, write_text
from hybrid_strategy.planning.calibrate import Observation, calibrate
from hybrid_strategy.planning.memory import likely_peak_ledger
from hybrid_strategy.planning.scenario import Scenario
from hybrid_strategy.spec.cluster import ClusterSpec


@dataclass(frozen=True)
class MeasuredRun:
    """A run that has been measured: what it was, its step and the memory of its fullest rank."""

    folder: Path
    config: RunConfig
    scenario: Scenario
    step_seconds: float
    peak_memory_bytes: float
    accelerator: str


def measured_run(folder: Path) -> MeasuredRun:
    """A run folder of `hybrid train`.

    Raises:
        ConfigError: it is none, the run was not measured, or it cannot be forecast.
    """
    result = read_json(folder / RESULT_FILE)
    if result is None or not (folder / CONFIG_FILE).is_file():
        rule, advice = "it must be the folder of a finished run", f"Set a folder that holds {CONFIG_FILE} and {RESULT_FILE}"
        raise ConfigError(message("run", str(folder), rule, "", advice))
    config = read_config(folder)
    planned = plan_of(config)
    scenario, measured = scenario_of(config, planned), result.get("measured")
    if scenario is None or not measured:
        rule = "its steps were not measured" if scenario is not None else "its model or batch is not known to the planner"
        raise ConfigError(message("run", str(folder), rule, "", "Give a run of a language model on text with 5 steps or more"))
    step, memory = float(measured["step_seconds"]), float(measured["peak_memory_bytes"])
    return MeasuredRun(folder, config, scenario, step, memory, planned.world.accelerator)


def machine_of(runs: Sequence[MeasuredRun]) -> Machine:
    """The machine on which all of the runs were: as it is known now.

    Raises:
        ConfigError: they were on different clusters.
    """
    names = sorted({f"{run.config.cluster.name}, {run.accelerator}" for run in runs})
    if len(names) != 1:
        raise ConfigError(message("runs", names, "all must be of one cluster", "", "Give the runs of one"))
    first = runs[0]
    if first.config.cluster.name != LOCAL:
        return Machine(first.scenario.cluster)
    path = machine_file(first.config.paths.cache_dir, first.accelerator)
    return read_machine(path) if path.is_file() else Machine(first.scenario.cluster, 0.0)


def refitted(machine: Machine, runs: Sequence[MeasuredRun], pull: float = 0.02) -> Machine:
    """The machine with coefficients under which the forecasts of these runs are nearest.

    What no formula holds of a process's memory is refitted too, where the whole process was measured.
    """
    cluster = calibrate(machine.cluster, [Observation(run.scenario, run.step_seconds) for run in runs], pull)
    missing = [run.peak_memory_bytes - likely_peak_ledger(run.scenario).total_bytes for run in runs if run.accelerator == "cpu"]
    if missing:
        cluster = replace(cluster, reserve_bytes=max(0.0, cluster.reserve_bytes + median(missing)))
    return replace(machine, cluster=cluster)


def under(machine: Machine, run: MeasuredRun) -> Scenario:
    """The run as it would be forecast with this machine."""
    cluster = shared(machine, run.scenario.cluster.gpus_per_node) if machine.cores else machine.cluster
    here = run.scenario.cluster
    return replace(run.scenario, cluster=replace(cluster, num_nodes=here.num_nodes, gpus_per_node=here.gpus_per_node))


def write_cluster(path: Path, cluster: ClusterSpec, runs: Sequence[MeasuredRun]) -> None:
    """A file for `conf/cluster/`."""
    text = OmegaConf.to_yaml(OmegaConf.create({**asdict(cluster), "name": path.stem}))
    folders = "\n".join(f"#   {run.folder}" for run in runs)
    write_text(path, f"# Refitted by `hybrid calibrate` from\n{folders}\n{text}")


def keep(machine: Machine, run: MeasuredRun) -> Path:
    """Writes this machine's file and returns where it is."""
    path = machine_file(run.config.paths.cache_dir, run.accelerator)
    write_machine(path, machine)
    return path
