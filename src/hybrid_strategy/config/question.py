"""From a configuration to what the planner is asked, and from its answer back to settings. No torch, no process."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from typing import Any

from hybrid_strategy.config.machine import cluster_of
from hybrid_strategy.config.settings import AUTO, RunConfig, StrategySettings
from hybrid_strategy.config.targets import TEXT_DATA, global_batch_size_of, numerics_of_run, trained_shape_of
from hybrid_strategy.config.world import World
from hybrid_strategy.errors import ConfigError, message
from hybrid_strategy.planning.balance import cut_units, layer_like, unit_names
from hybrid_strategy.planning.forecast import Forecast
from hybrid_strategy.planning.refusals import check_whole
from hybrid_strategy.planning.search import Question, search
from hybrid_strategy.spec.model_shape import ModelShape

AXES = (
    "data_parallel_size",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "context_parallel_size",
    "data_parallel_replicate_size",
    "sharding",
    "sequence_parallel",
    "schedule",
    "stages_per_rank",
    "num_microbatches",
    "micro_batch_size",
    "activation_checkpoint",
)
"""Settings of the strategy that the planner may choose."""

_DEFAULTS: dict[str, Any] = {each.name: each.default for each in fields(StrategySettings)}


def is_automatic(strategy: StrategySettings) -> bool:
    """Is something left to the planner? A data-parallel size that is what the others leave is not."""
    return any(getattr(strategy, axis) == AUTO for axis in AXES if axis != "data_parallel_size")


def fixed_of(config: RunConfig, overrides: Iterable[str] = ()) -> dict[str, Any]:
    """What the user has set of the layout: what differs from the defaults, and what is named on the command line.

    Where some settings are `auto`, all others are meant as they stand.
    """
    strategy = config.strategy
    named = {text.lstrip("+").partition("=")[0] for text in overrides}
    whole = is_automatic(strategy)
    given = {axis: getattr(strategy, axis) for axis in AXES}
    meant = [axis for axis in AXES if whole or f"strategy.{axis}" in named or given[axis] != _DEFAULTS[axis]]
    fixed = {axis: given[axis] for axis in meant if given[axis] not in (None, AUTO)}
    if strategy.compile:
        fixed["compile"] = True
    if strategy.stage_cuts is not None:
        fixed["stage_layers"] = _stage_layers(config, strategy.stage_cuts)
    return fixed


def _stage_layers(config: RunConfig, cuts: tuple[int, ...]) -> tuple[int, ...]:
    shape = trained_shape_of(config)
    if shape is None:
        return ()
    stages = cut_units(unit_names(shape), len(cuts) + 1, stage_cuts=cuts)
    return tuple(sum(layer_like(stage)) for stage in stages)


def why_not(config: RunConfig, shape: ModelShape | None = None) -> str:
    """Why nothing can be forecast of this configuration; empty where it can. `shape`: of a model of the user's own."""
    if shape is None and trained_shape_of(config) is None:
        return f"the sizes of the model {config.model.get('_target_', '')} are not known"
    if global_batch_size_of(config, 1) is None:
        return f"the data {config.data.get('_target_', '')} does not tell its batch (data.batch_size)"
    return ""


def batch_note(config: RunConfig) -> str:
    """What is assumed of the user's own data, whose loaders yield the batch of one data-parallel rank; else empty."""
    rows = config.data.get("batch_size")
    if config.data.get("_target_") == TEXT_DATA or not isinstance(rows, int):
        return ""
    return (
        f"data.batch_size={rows} is that of a rank; layouts are compared at the samples of as many ranks as there are processes"
    )


def question_of(config: RunConfig, world: World, fixed: Mapping[str, Any], own: ModelShape | None = None) -> Question:
    """The planner's question; `why_not` must be empty. `own`: the shape of a model of the user's own."""
    shape = own or trained_shape_of(config)
    assert shape is not None  # why_not has said so
    accumulate, size = config.trainer.accumulate_grad_batches, global_batch_size_of(config, world.size)
    if size is not None:
        check_whole({"data.global_batch_size": size})
    return Question(
        shape=shape,
        cluster=cluster_of(config, world),
        global_batch_size=size or 1,
        numerics=numerics_of_run(config),
        fixed={**fixed, **({"accumulate_grad_batches": accumulate} if accumulate > 1 else {})},
        world_size=world.size,
    )


def settled(config: RunConfig, world: World) -> tuple[StrategySettings, tuple[str, ...]]:
    """The strategy with what was left to the planner decided, and why it is what it is.

    Raises:
        NoLayoutFitsError: no layout fits.
        ConfigError: a learning rate, batch or size that excludes every layout.
    """
    strategy = config.strategy
    if not is_automatic(strategy):
        return strategy, ()
    reason = why_not(config) or batch_note(config)
    if reason:
        plain = {axis: _DEFAULTS[axis] for axis in AXES if getattr(strategy, axis) == AUTO}
        return replace(strategy, **plain), (f"data parallelism takes what is not set, since {reason}",)
    question = question_of(config, world, fixed_of(config))
    result = search(question)
    if not result.forecasts and not result.misfits:
        raise nothing_possible(question)
    winner = result.winner
    step, memory = winner.step_seconds, winner.ledger.total_bytes / 2**30
    why = f"the planner's choice among {result.examined} layouts: {step:.3g} s a step, {memory:.1f} GiB on a rank"
    return chosen(strategy, winner), (why,)


def chosen(strategy: StrategySettings, winner: Forecast) -> StrategySettings:
    """The settings of a forecast layout."""
    layout = winner.scenario.layout
    values = {axis: getattr(layout, axis) for axis in AXES if hasattr(layout, axis)}
    values["micro_batch_size"] = winner.scenario.micro_batch_size
    return replace(strategy, **values, num_microbatches=None)


def nothing_possible(question: Question) -> ConfigError:
    """That not one layout was there to be looked at."""
    rule = "no layout divides it among the processes"
    numbers = f"{question.processes} processes, {question.shape.kv_heads} key-value heads, {question.shape.num_layers} layers"
    return ConfigError(
        message("data.global_batch_size", question.global_batch_size, rule, numbers, f"Set a multiple of {question.processes}")
    )
