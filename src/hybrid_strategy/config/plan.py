"""From a configuration to the plan of its run, or a refusal by full key. No torch, no process."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from hybrid_strategy.config.question import AXES, settled
from hybrid_strategy.config.settings import RunConfig, StrategySettings
from hybrid_strategy.config.targets import global_batch_size_of, sequence_length_of, trained_shape_of
from hybrid_strategy.config.validate import check_model, check_words
from hybrid_strategy.config.world import World, world_of
from hybrid_strategy.errors import ConfigError, message
from hybrid_strategy.planning.batches import MICROBATCHES_PER_RANK, resolve_batch
from hybrid_strategy.planning.build_plan import Decisions, build_plan
from hybrid_strategy.planning.choices import one_of
from hybrid_strategy.planning.compiler import check_compiler
from hybrid_strategy.planning.layouts import Fits, check_layout, find_schedule, resolve_layout
from hybrid_strategy.planning.refusals import check_reduce_dtype, check_when_busy
from hybrid_strategy.planning.staging import checkpoint_bytes, staging_bytes
from hybrid_strategy.spec.batch import BatchSpec
from hybrid_strategy.spec.layout import Layout
from hybrid_strategy.spec.model_shape import ModelShape
from hybrid_strategy.spec.plan import Plan

_FULL_KEYS = {each.name: f"strategy.{each.name}" for each in fields(StrategySettings)} | {
    "global_batch_size": "data.global_batch_size",
    "accumulate_grad_batches": "trainer.accumulate_grad_batches",
    "sequence_length": "model.sequence_length",
    "world_size": "cluster.devices",
}
_LAYOUT = (*(axis for axis in AXES if axis not in ("num_microbatches", "micro_batch_size")), "compile")
_KEY = re.compile(rf"(?<![\w.])({'|'.join(_FULL_KEYS)})(?==| is )")
_PROCESSES = re.compile(r"([Ss])tart ([\d, or]+) process(es)?")


@dataclass(frozen=True)
class RunPlan:
    """The plan and the processes that will play it. `strategy`: the settings with what was left to the planner decided."""

    world: World
    plan: Plan
    strategy: StrategySettings = field(default_factory=StrategySettings)

    def to_dict(self) -> dict[str, Any]:
        """What `plan.json` holds."""
        world = {"num_nodes": self.world.num_nodes, "devices": self.world.devices, "accelerator": self.world.accelerator}
        return {"name": self.plan.layout.name, "world_size": self.world.size, **world, **self.plan.to_dict()}


def plan_of(config: RunConfig) -> RunPlan:
    """The plan of exactly what `hybrid train` would run.

    Raises:
        ConfigError: the configuration cannot be honoured.
    """
    check_words(config)
    check_model(config)
    world = world_of(config)
    try:
        strategy, reasons = settled(config, world)
        plan = _with_staging(_planned(replace(config, strategy=strategy), world), config, world.size)
    except ConfigError as error:
        text = by_full_key(str(error), world.num_nodes)
        if config.data.get("sequence_length") is not None:
            text = text.replace("model.sequence_length is", "data.sequence_length is")
        raise type(error)(text) from error
    return RunPlan(world, replace(plan, reasons=(*plan.reasons, *reasons)), strategy)


def by_full_key(text: str, num_nodes: int = 1) -> str:
    """A refusal of the planning floor, which knows the strategy's arguments, in the words of the configuration.

    >>> by_full_key("sharding is 'zero1': no. Set schedule=1F1B, or start 2 processes.")
    "strategy.sharding is 'zero1': no. Set strategy.schedule=1F1B, or cluster.devices=2."
    """

    def devices(found: re.Match[str]) -> str:
        counts = [int(each) for each in re.findall(r"\d+", found[2])]
        if any(count % num_nodes for count in counts):
            return found[0]
        return f"{'Set ' if found[1] == 'S' else ''}cluster.devices={one_of(count // num_nodes for count in counts)}"

    return _PROCESSES.sub(devices, _KEY.sub(lambda found: _FULL_KEYS[found[1]], text))


def _planned(config: RunConfig, world: World) -> Plan:
    check_reduce_dtype(config.strategy.reduce_dtype)
    check_when_busy(config.strategy.checkpoint_when_busy, config.strategy.asynchronous_checkpoint)
    if config.strategy.compile and config.cluster.name == "local":  # of another machine nothing is known here
        check_compiler(world.accelerator)
    return _plan(config, *_checked(config, world, lambda sizes, processes: _would_do(config, world, sizes, processes)))


def _checked(config: RunConfig, world: World, fits: Fits | None) -> tuple[Layout, BatchSpec, ModelShape | None]:
    """Layout, batch and shape, which go together."""
    sizes = {name: getattr(config.strategy, name) for name in _LAYOUT}
    layout, shape = resolve_layout(world_size=world.size, fits=fits, **sizes), trained_shape_of(config)
    batch, known = _batch(config, layout)
    nodes = max(world.devices, config.cluster.nvlink_domain_size) if world.num_nodes > 1 else None
    follows = config.cluster.name == "local" and config.cluster.devices == "auto" and world.accelerator == "cpu"
    cut = None if shape is None else replace(shape, sequence_length=sequence_length_of(config))
    check_layout(layout, shape=cut, batch=batch if known else None, gpus_per_node=nodes, world_follows=follows)
    return layout, batch, shape


def _would_do(config: RunConfig, world: World, sizes: Mapping[str, int], processes: int) -> bool:
    """Would a run with these sizes instead be accepted?"""
    if processes % world.num_nodes:
        return False
    other = replace(config, strategy=replace(config.strategy, **sizes))  # type: ignore[arg-type]
    try:
        _checked(other, replace(world, devices=processes // world.num_nodes), None)
    except ConfigError:
        return False
    return True


def _with_staging(plan: Plan, config: RunConfig, world_size: int) -> Plan:
    """With the host memory that checkpoints in the background need, where there are such and the model's size is known."""
    if not config.strategy.asynchronous_checkpoint or not plan.num_parameters:
        return plan
    whole = checkpoint_bytes(plan.num_parameters, config.optimizer, 2 if config.precision.mode.endswith("16-true") else 4)
    return replace(plan, extra={**plan.extra, "checkpoint_staging_bytes": staging_bytes(whole, world_size)})


def _batch(config: RunConfig, layout: Layout) -> tuple[BatchSpec, bool]:
    """The batch, and whether it is known: of the user's own data it may show only when the data is read."""
    accumulate = config.trainer.accumulate_grad_batches
    given: dict[str, Any] = {name: getattr(config.strategy, name) for name in ("num_microbatches", "micro_batch_size")}
    size = global_batch_size_of(config, layout.data_parallel_size)
    if size is None:
        if config.learning_rate.scaling not in ("none", "auto") or config.learning_rate.base_batch_size:
            rule, advice = "it needs the size of the batch", "Set data.batch_size, or learning_rate.scaling=none"
            raise ConfigError(message("learning_rate.scaling", config.learning_rate.scaling, rule, "", advice))
        default = MICROBATCHES_PER_RANK * layout.pipeline_parallel_size if layout.pipeline_parallel_size > 1 else 1
        return BatchSpec(0, given["num_microbatches"] or default, accumulate), False
    return resolve_batch(layout, global_batch_size=size, accumulate_grad_batches=accumulate, **given), True


def _plan(config: RunConfig, layout: Layout, batch: BatchSpec, shape: ModelShape | None) -> Plan:
    if shape is not None:
        decided = Decisions(config.optimizer, config.learning_rate, config.strategy.stage_cuts)
        return build_plan(layout, batch, shape, decided)
    schedule = find_schedule(layout.schedule)
    sizes = (layout.pipeline_parallel_size, layout.stages_per_rank)
    bubble = schedule.bubble_fraction(*sizes, batch.num_microbatches)
    return Plan(layout, batch, bubble, extra={"stage_ranks": list(schedule.stage_ranks(*sizes))})
