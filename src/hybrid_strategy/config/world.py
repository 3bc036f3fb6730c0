"""How many processes a run has, and on what they compute: known before any of them is started, and without torch."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from importlib.metadata import version

from hybrid_strategy.config.settings import RunConfig
from hybrid_strategy.errors import ConfigError, did_you_mean, message

_ACCELERATORS = {"auto": "auto", "cpu": "cpu", "gpu": "cuda", "cuda": "cuda"}


@dataclass(frozen=True)
class World:
    """The processes of a run. `note`: a decision that the user should know of."""

    num_nodes: int
    devices: int
    accelerator: str
    note: str = ""

    @property
    def size(self) -> int:
        return self.num_nodes * self.devices


def visible_gpus() -> int:
    """CUDA devices that a process started now would see; 0 where torch was built for the CPU.

    Asks the driver itself (`cuDeviceGetCount`), which respects `CUDA_VISIBLE_DEVICES`, because importing torch takes seconds.
    """
    driver, count = _driver(), ctypes.c_int(0)
    if driver is None or driver.cuDeviceGetCount(ctypes.byref(count)):
        return 0
    return count.value


def gpu_name() -> str:
    """The driver's name of the first GPU, e.g. `NVIDIA H100 80GB HBM3`; empty where there is none."""
    driver, name = _driver(), ctypes.create_string_buffer(128)
    if driver is None or driver.cuDeviceGetName(name, len(name), 0):
        return ""
    return name.value.decode(errors="replace")


def _driver() -> ctypes.CDLL | None:
    """The driver's library, initialised; None where torch was built for the CPU or there is no driver."""
    if version("torch").endswith("+cpu"):
        return None
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    return None if driver.cuInit(0) else driver


def world_of(config: RunConfig) -> World:
    """The processes that this configuration asks for.

    Raises:
        ConfigError: more GPUs than there are, or an accelerator that is not known.
    """
    accelerator = _accelerator(config)
    asked, nodes = config.cluster.devices, config.cluster.num_nodes
    if asked != "auto" and (not isinstance(asked, int) or asked < 1):
        raise ConfigError(
            message("cluster.devices", asked, "it must be auto or a whole number of 1 or more", "", "Set auto or 1")
        )
    if config.cluster.name != "local":  # machines that are not this one
        return World(nodes, config.cluster.gpus_per_node if asked == "auto" else int(asked), accelerator.replace("auto", "cuda"))
    gpus = 0 if accelerator == "cpu" else visible_gpus()
    if accelerator == "cuda" and gpus == 0:
        raise ConfigError(
            message("trainer.accelerator", config.trainer.accelerator, "torch sees no GPU here", "", "Set auto or cpu")
        )
    needed = -(-_needed(config) // nodes)
    if asked != "auto":
        return _asked_for(config, int(asked), accelerator, gpus)
    if gpus >= needed:
        return _on_gpus(config, needed, gpus)
    if accelerator == "cuda":
        rule, numbers = "there are not enough GPUs for the layout", f"{needed} are needed, torch sees {gpus}"
        raise ConfigError(
            message("trainer.accelerator", accelerator, rule, numbers, "Set smaller sizes, or trainer.accelerator=cpu")
        )
    note = f"{_gpus(gpus)} for the {needed} processes of this layout: running on the CPU" if gpus else ""
    return World(nodes, needed, "cpu", note)


def _accelerator(config: RunConfig) -> str:
    given = config.trainer.accelerator
    if given not in _ACCELERATORS:
        rule = "there is no accelerator of this name"
        raise ConfigError(message("trainer.accelerator", given, rule, "", did_you_mean(given, _ACCELERATORS)))
    return _ACCELERATORS[given]


def _needed(config: RunConfig) -> int:
    """Processes of one copy of the model, times the copies where their number is given."""
    given = config.strategy
    sizes = (
        given.tensor_parallel_size,
        given.pipeline_parallel_size,
        given.context_parallel_size,
        given.data_parallel_size,
    )
    return max(1, math.prod(size for size in sizes if isinstance(size, int)))


def _asked_for(config: RunConfig, devices: int, accelerator: str, gpus: int) -> World:
    if accelerator == "cuda" and devices > gpus:
        raise ConfigError(message("cluster.devices", devices, f"torch sees {gpus} GPUs here", "", f"Set {gpus} or less"))
    if accelerator != "cpu" and gpus >= devices:
        return World(config.cluster.num_nodes, devices, "cuda")
    note = f"{_gpus(gpus)} for {devices} processes: running on the CPU" if gpus else ""
    return World(config.cluster.num_nodes, devices, "cpu", note)


def _on_gpus(config: RunConfig, needed: int, gpus: int) -> World:
    """All GPUs where the data-parallel size is what is left, else those the layout needs."""
    devices = gpus // needed * needed if config.strategy.data_parallel_size == "auto" else needed
    note = f"{devices} of {gpus} GPUs are used" if devices < gpus else ""
    return World(config.cluster.num_nodes, devices, "cuda", note)


def _gpus(count: int) -> str:
    return "only 1 GPU" if count == 1 else f"only {count} GPUs"
