"""The strategy's arguments as one object, and the layout they make once the number of processes is known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

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
    check_switch("compile", given["compile"])
    _check_values(given)
    given["timeout"] = _time(given["timeout"])
    for key in ("sharding", "activation_checkpoint"):
        given[key] = str(given[key]).lower()
    given["schedule"] = find_schedule(given["schedule"]).name
    check_layout(Layout(sharding=given["sharding"], activation_checkpoint=given["activation_checkpoint"]))
    for key, ways in (("checkpoint_error", CHECKPOINT_ERROR), ("checkpoint_when_busy", CHECKPOINT_WHEN_BUSY)):
        if given[key] not in ways:
            advice = did_you_mean(given[key], ways)
            raise ConfigError(message(key, given[key], "there is no such way", "", advice))
    if given["stage_cuts"] is not None:
        given["stage_cuts"] = tuple(given["stage_cuts"])
    if isinstance(given["parallel_plan"], Mapping):
        given["parallel_plan"] = plan_from(given["parallel_plan"])
    return Options(**given)


def _check_values(given: Mapping[str, Any]) -> None:
    """What a type alone does not say."""
    seed, backend, plan = (given[key] for key in ("seed", "process_group_backend", "parallel_plan"))
    if seed is not None and not (isinstance(seed, int) and 0 <= seed <= LARGEST_SEED):
        rule = f"a seed is a whole number of 0 to {LARGEST_SEED}"
        raise ConfigError(message("seed", seed, rule, "", "Set such a number"))
    known = Backend.backend_list
    for part in [] if backend is None else str(backend).split(","):
        if part.split(":")[-1].lower() not in known:
            advice = did_you_mean(part, known)
            raise ConfigError(message("process_group_backend", backend, "torch has no such backend", "", advice))
    if plan is not None and not isinstance(plan, (ParallelPlan, Mapping)):
        advice = "Set a ParallelPlan, or leave it out"
        raise ConfigError(message("parallel_plan", plan, "it must be a ParallelPlan, or a mapping of its fields", "", advice))


def _time(given: Any) -> timedelta:
    found = timedelta(seconds=given) if isinstance(given, (int, float)) and not isinstance(given, bool) else given
    if not isinstance(found, timedelta) or found <= timedelta(0):
        raise ConfigError(message("timeout", given, "it is seconds, or a timedelta, of more than 0", "", "Set such as 1800"))
    return found


def refuse_synchronised_norms(layout: Layout) -> None:
    """Of the Trainer's `sync_batchnorm=True`.

    Raises:
        ConfigError: always.
    """
    rule = "a step runs micro-batch by micro-batch, so statistics over the ranks of one would still not be those of the batch"
    advice = "Set false, and use norms that look at one sample (GroupNorm, LayerNorm) where the numbers must not depend on it"
    raise ConfigError(message("sync_batchnorm", True, rule, f"The layout is {layout.name}", advice))
