"""What is known of the machines of a run: a named cluster's file; of this machine what was measured, else a guess by its name."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from hybrid_strategy.config.folders import shipped_folder
from hybrid_strategy.config.settings import ClusterSettings, RunConfig
from hybrid_strategy.config.world import World, gpu_name
from hybrid_strategy.files import cache_folder, write_text
from hybrid_strategy.spec.cluster import ClusterSpec, KernelSpec, LinkSpec, cluster_from_mapping

LOCAL = "local"

_KNOWN_GPUS = (
    ("GB200", "gb200"),
    ("B200", "b200"),
    ("H200", "h200"),
    ("H100", "h100_sxm"),
    ("A100-SXM4-40GB", "a100_40"),
    ("A100", "a100_80"),
    ("V100", "v100_32"),
    ("MI300X", "mi300x"),
)
"""Part of the driver's name of a GPU -> the cluster file whose numbers are near."""

_RATES = ("peak_flops", "peak_fp32_flops", "memory_bytes_per_second")

PROCESSOR = ClusterSpec(
    name=LOCAL,
    gpu="processor",
    gpus_per_node=1,
    memory_bytes=4e9,
    peak_flops=50e9,
    peak_fp32_flops=0.0,
    memory_bytes_per_second=8e9,
    intra_node=LinkSpec(1.5e9, 1.0, 1e-4),
    inter_node=LinkSpec(1e8, 1.0, 2e-4),
    kernels=KernelSpec(0.7, 0.0, 0.3, 0.8, 1e-5),
    synchronous=True,
    reserve_bytes=0.4e9,
    source="a guess for one core; `hybrid doctor` measures this machine",
)
"""One core of an ordinary processor, where nothing was measured."""


def machine_file(cache_dir: str | None, accelerator: str) -> Path:
    """Where `hybrid doctor` keeps what it measured of this machine; folders of several machines may be the same one."""
    return cache_folder(cache_dir) / "cluster" / f"{platform.node() or 'machine'}-{accelerator}.yaml"


@dataclass(frozen=True)
class Machine:
    """This machine, measured.

    Attributes:
        cluster: one GPU; of a processor one core while the others are at work.
        cores: of a processor; 0: GPUs.
        alone: rates of a single process on all cores over those of one core, by field of the cluster.
    """

    cluster: ClusterSpec
    cores: float = 0.0
    alone: Mapping[str, float] = field(default_factory=dict)


def write_machine(path: Path, machine: Machine) -> None:
    """Keeps measured values."""
    write_text(path, OmegaConf.to_yaml(OmegaConf.create(asdict(machine))))


def read_machine(path: Path) -> Machine:
    """What `write_machine` kept."""
    values = _read(path)
    return Machine(cluster_from_mapping(values["cluster"]), float(values["cores"]), values["alone"])


def cluster_of(config: RunConfig, world: World) -> ClusterSpec:
    """The machines of a run, as many GPUs to a node as it has processes on one.

    Values that the configuration sets stay; what it leaves open of `local` is filled in from what is known of this machine.
    """
    known = {each.name: getattr(config.cluster, each.name) for each in fields(ClusterSpec)}
    if config.cluster.name == LOCAL and not config.cluster.measured:
        blank = ClusterSettings()
        given = {name: value for name, value in known.items() if value != getattr(blank, name)}
        found = this_machine(config.paths.cache_dir, world)
        known = {each.name: getattr(found, each.name) for each in fields(ClusterSpec)} | given
    return ClusterSpec(**{**known, "num_nodes": world.num_nodes, "gpus_per_node": world.devices})


def this_machine(cache_dir: str | None, world: World) -> ClusterSpec:
    """What is known of this machine: measured, else by the name of its GPU, else a guess."""
    path = machine_file(cache_dir, world.accelerator)
    if path.is_file():
        return shared(read_machine(path), world.devices)
    if world.accelerator == "cpu":
        return shared(Machine(PROCESSOR, float(num_cores())), world.devices)
    name = gpu_name()
    known = next((file for part, file in _KNOWN_GPUS if part.lower() in name.lower()), None)
    values = _read(shipped_folder("conf") / "cluster" / f"{known or 'a100_80'}.yaml")
    source = f"the numbers of {known}" if known else f"GPU {name or 'without a name'} is not known: the numbers of an A100"
    return replace(cluster_from_mapping(values), name=LOCAL, source=f"{source}; `hybrid doctor` measures this machine")


def shared(machine: Machine, processes: int) -> ClusterSpec:
    """The machine as each of `processes` sees it: they share a processor's cores and its memory, and have a GPU each.

    A process runs as many threads as there are cores for it (`launch.launchers.local`).
    """
    cluster, cores = machine.cluster, machine.cores
    if not cores:
        return cluster
    threads, share = max(1, int(cores // processes)), min(1.0, cores / processes)
    if processes == 1:
        faster = {name: machine.alone.get(name, float(threads)) for name in _RATES}
    else:
        faster = dict.fromkeys(_RATES, float(threads) * share)
    rates = {name: getattr(cluster, name) * faster[name] for name in _RATES}
    kernels = replace(cluster.kernels, launch_seconds=cluster.kernels.launch_seconds / share)
    return replace(cluster, memory_bytes=_memory_bytes(cluster.memory_bytes) / processes, kernels=kernels, **rates)


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _memory_bytes(otherwise: float) -> float:
    """Memory of this machine."""
    try:
        return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    except (ValueError, OSError):
        return otherwise


def _read(path: Path) -> dict[str, Any]:
    values = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    return {str(key): value for key, value in values.items() if key not in ("devices", "launcher")}  # type: ignore[union-attr]
