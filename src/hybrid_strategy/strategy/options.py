"""The strategy's arguments as one object, and the layout they make once the number of processes is known."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from os import PathLike
from pathlib import Path
from typing import Any

from lightning.fabric.plugins import TorchCheckpointIO
from torch.distributed import Backend

from hybrid_strategy.errors import ConfigError, LayoutError, did_you_mean, message
from hybrid_strategy.planning.batches import default_num_microbatches
from hybrid_strategy.planning.layouts import check_layout, find_schedule, resolve_layout
from hybrid_strategy.planning.refusals import (
    CHECKPOINT_ERROR,
    CHECKPOINT_WHEN_BUSY,
    LARGEST_SEED,
    check_reduce_dtype,
    check_switch,
    check_when_busy,
    check_whole,
)
from hybrid_strategy.spec.layout import Layout
from hybrid_strategy.spec.parallel_plan import ParallelPlan, plan_from


@dataclass(frozen=True)
class Options:
    """What the user asked for. The meaning of each field is in `HybridParallelStrategy`."""

    data_parallel_size: int | str
    tensor_parallel_size: int
    pipeline_parallel_size: int
    context_parallel_size: int
    data_parallel_replicate_size: int
    sharding: str
    sequence_parallel: bool
    schedule: str
    stages_per_rank: int | None
    num_microbatches: int | None
    micro_batch_size: int | None
    stage_cuts: tuple[int, ...] | None
    activation_checkpoint: str
    compile: bool
    module: str | None
    parallel_plan: ParallelPlan | None
    process_group_backend: str | None
    timeout: timedelta
    seed: int | None
    reduce_dtype: str | None
    initial_weights: str | None
    asynchronous_checkpoint: bool
    checkpoint_when_busy: str
    checkpoint_error: str

    def layout(self, world_size: int) -> Layout:
        """The layout of `world_size` processes.

        Raises:
            LayoutError: the sizes cannot be honoured.
        """
        return resolve_layout(
            world_size=world_size,
            data_parallel_size=self.data_parallel_size,
            tensor_parallel_size=self.tensor_parallel_size,
            pipeline_parallel_size=self.pipeline_parallel_size,
            context_parallel_size=self.context_parallel_size,
            data_parallel_replicate_size=self.data_parallel_replicate_size,
            sharding=self.sharding,
            sequence_parallel=self.sequence_parallel,
            schedule=self.schedule,
            stages_per_rank=self.stages_per_rank,
            activation_checkpoint=self.activation_checkpoint,
            compile=self.compile,
        )

    def microbatches_of(self, rows: int, pipeline_size: int) -> int:
        """Micro-batches that a batch of `rows` samples is cut into."""
        if self.micro_batch_size is not None:
            return -(-rows // self.micro_batch_size)
        if self.num_microbatches is not None:
            return self.num_microbatches
        return default_num_microbatches(rows, pipeline_size)


def make_options(**given: Any) -> Options:
    """Checks what can be checked without knowing the number of processes.

    Raises:
        ConfigError: a word that is not known, or settings that exclude each other.
    """
    if given["num_microbatches"] is not None and given["micro_batch_size"] is not None:
        rule = "it and num_microbatches say the same thing in two ways, so only one may be set"
        numbers = f"num_microbatches is {given['num_microbatches']}"
        advice = "Set one and leave the other out"
        raise LayoutError(message("micro_batch_size", given["micro_batch_size"], rule, numbers, advice))
    wholes = ("num_microbatches", "micro_batch_size")
    check_whole({key: given[key] for key in wholes if given[key] is not None})
    check_reduce_dtype(given["reduce_dtype"])
    for key in ("compile", "sequence_parallel", "asynchronous_checkpoint"):
        check_switch(key, given[key])
    _check_values(given)
    given["timeout"] = _time(given["timeout"])
    for key in ("sharding", "activation_checkpoint"):
        given[key] = str(given[key]).lower()
    given["schedule"] = find_schedule(given["schedule"]).name
    check_layout(Layout(sharding=given["sharding"], activation_checkpoint=given["activation_checkpoint"]))
    for key, ways in (("checkpoint_error", CHECKPOINT_ERROR), ("checkpoint_when_busy", CHECKPOINT_WHEN_BUSY)):
        if given[key] not in ways:
            advice = did_you_mean(str(given[key]), ways)
            raise ConfigError(message(key, given[key], "there is no such way", "", advice))
    check_when_busy(given["checkpoint_when_busy"], given["asynchronous_checkpoint"])
    if given["stage_cuts"] is not None:
        given["stage_cuts"] = _cuts(given["stage_cuts"])
    if isinstance(given["parallel_plan"], Mapping):
        given["parallel_plan"] = plan_from(given["parallel_plan"])
    return Options(**given)


def _check_values(given: Mapping[str, Any]) -> None:
    """What a type alone does not say."""
    seed, backend, plan = (given[key] for key in ("seed", "process_group_backend", "parallel_plan"))
    if seed is not None and not (isinstance(seed, int) and not isinstance(seed, bool) and 0 <= seed <= LARGEST_SEED):
        rule = f"a seed is a whole number of 0 to {LARGEST_SEED}"
        raise ConfigError(message("seed", seed, rule, "", "Set such a number"))
    known = Backend.backend_list
    for part in [] if backend is None else str(backend).split(","):
        if part.split(":")[-1].lower() not in known:
            advice = did_you_mean(part, known)
            raise ConfigError(message("process_group_backend", backend, "torch has no such backend", "", advice))
    for key, what in (("module", "the name of a submodule"), ("initial_weights", "a path")):
        if given[key] is not None and not (isinstance(given[key], str | PathLike) and str(given[key]).strip()):
            raise ConfigError(message(key, given[key], f"it must be {what}", "", f"Set {what}, or leave it out"))
    if plan is not None and not isinstance(plan, (ParallelPlan, Mapping)):
        advice = "Set a ParallelPlan, or leave it out"
        raise ConfigError(message("parallel_plan", plan, "it must be a ParallelPlan, or a mapping of its fields", "", advice))


def _cuts(given: Any) -> tuple[int, ...]:
    if isinstance(given, str) or not isinstance(given, Iterable):
        advice = "Set a list such as [3, 6], or leave it out"
        raise ConfigError(message("stage_cuts", given, "it is the first unit of every stage but the first", "", advice))
    return tuple(given)


def _time(given: Any) -> timedelta:
    found = given
    if isinstance(given, (int, float)) and not isinstance(given, bool):
        with suppress(OverflowError, ValueError):  # of what is not finite
            found = timedelta(seconds=given)
    if not isinstance(found, timedelta) or found <= timedelta(0):
        raise ConfigError(message("timeout", given, "it is seconds, or a timedelta, of more than 0", "", "Set such as 1800"))
    return found


def check_before_start(options: Options, device_type: str) -> None:
    """What every process would refuse, seen by the one that starts them.

    Raises:
        ConfigError: a file of weights that is not there, a backend that does not work on this device.
    """
    weights, backend = options.initial_weights, options.process_group_backend
    if weights is not None and not Path(weights).expanduser().exists():
        rule, numbers = "there is no such file or folder", f"Looked from {Path.cwd()}"
        raise ConfigError(message("initial_weights", weights, rule, numbers, "Set one that exists"))
    if device_type == "cpu" and backend is not None and backend.lower() == "nccl":
        rule, advice = "NCCL works on GPUs only", "Set gloo, or leave it out"
        raise ConfigError(message("process_group_backend", backend, rule, "The ranks run on the CPU", advice))


def refuse_plugins(layout: Layout, layer_sync: object | None, checkpoint_io: object | None) -> None:
    """Of the Trainer's plug-ins (`sync_batchnorm=True` is one) those that would do nothing, or not what they say.

    Raises:
        ConfigError: there is such a one.
    """
    if layer_sync is not None and layout.world_size > 1:
        rule = "a step runs micro-batch by micro-batch, so statistics over the ranks of one would still not be those of the batch"
        advice = "Set false, and use norms that look at one sample (GroupNorm, LayerNorm) where the numbers must not depend on it"
        raise ConfigError(message("sync_batchnorm", True, rule, f"The layout is {layout.name}", advice))
    if checkpoint_io is not None and type(checkpoint_io) is not TorchCheckpointIO:  # Lightning makes one of these by itself
        rule = "a checkpoint is a folder that all ranks write, and a CheckpointIO writes what one rank has in one file"
        advice = "Leave it out; asynchronous_checkpoint=True writes while training goes on"
        raise ConfigError(message("plugins", type(checkpoint_io).__name__, rule, "", advice))
