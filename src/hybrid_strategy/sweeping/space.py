"""What a configuration leaves open for a layout sweep: how many processes, which axes, what they are judged by."""

from __future__ import annotations

import os
from collections.abc import Sequence

from hybrid_strategy.config.settings import AUTO, RunConfig, StrategySettings
from hybrid_strategy.config.targets import global_batch_size_of, numerics_of_run, trained_shape_of
from hybrid_strategy.config.world import visible_gpus
from hybrid_strategy.sweeping.axes import AXES, Axes
from hybrid_strategy.sweeping.grid import Choice
from hybrid_strategy.sweeping.layouts import Space, check_values
from hybrid_strategy.sweeping.pruning import Judge
from hybrid_strategy.sweeping.settings import LayoutsSettings

_PREFIX = "strategy."


def devices_at_hand(config: RunConfig) -> int:
    """Processes on each node: what is asked for, a described cluster's GPUs, this machine's GPUs, else its cores."""
    if isinstance(config.cluster.devices, int):
        return config.cluster.devices
    if config.cluster.name != "local":
        return config.cluster.gpus_per_node
    gpus = visible_gpus() if config.trainer.accelerator in ("auto", "gpu", "cuda") else 0
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return gpus or cores


def is_axis(key: str) -> bool:
    """Is it a key that the layouts decide, such as `strategy.sharding`?"""
    return key.removeprefix(_PREFIX) in AXES if key.startswith(_PREFIX) else False


def axes_of(choices: Sequence[Choice], free: Sequence[str], config: RunConfig, chosen: bool = False) -> Axes:
    """The axes of a sweep: what the command line says, what is free, what the configuration fixes.

    Args:
        chosen: `strategy=OPTION` was asked for; what it sets is as if it were said by itself.

    Raises:
        ConfigError: a word that names nothing, or an axis that is none.
    """
    given = {each.key.removeprefix(_PREFIX): each.values for each in choices if is_axis(each.key)}
    fixed = {axis: getattr(config.strategy, axis) for axis in (*AXES, "compile")}
    size = fixed.pop("data_parallel_size")
    if "data_parallel_size" not in given and isinstance(size, int):
        given["data_parallel_size"] = (size,)
    for axis, value in fixed.items() if chosen else ():
        if axis in free and value != getattr(StrategySettings, axis) and value != AUTO:
            given.setdefault(axis, (value,))
    for axis, values in given.items():
        check_values(axis, values)
    return Axes(given, tuple(axis for axis in free if axis not in given), fixed)


def space_of(config: RunConfig, axes: Axes) -> Space:
    """Where layouts are looked for."""
    devices, rows = devices_at_hand(config), config.strategy.micro_batch_size
    return Space(
        world_size=devices * config.cluster.num_nodes,
        axes=axes,
        gpus_per_node=devices if config.cluster.num_nodes > 1 else None,
        shape=trained_shape_of(config),
        global_batch_size=global_batch_size_of(config, 1),
        accumulate_grad_batches=config.trainer.accumulate_grad_batches,
        micro_batch_size=rows if isinstance(rows, int) else None,
    )


def judge_of(config: RunConfig, settings: LayoutsSettings, axes: Axes) -> Judge | None:
    """What forecasts layouts; None where the model or the batch is not known."""
    shape = trained_shape_of(config)
    if shape is None or not global_batch_size_of(config, 1):
        return None
    numerics = numerics_of_run(config)
    dominate = "activation_checkpoint" in axes.free
    return Judge(shape, config.cluster, numerics, settings.slack, dominate)


def is_known(config: RunConfig) -> bool:
    """Is something known of the machines? `cluster=local` describes none unless it was measured."""
    return config.cluster.name != "local" or config.cluster.measured
