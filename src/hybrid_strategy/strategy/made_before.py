"""Modules that an earlier Trainer of this process has parallelised: a second Trainer goes on with what is there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import lightning.pytorch as pl
import torch.distributed as dist

from hybrid_strategy.distributed.groups import Groups
from hybrid_strategy.errors import ConfigError, ModelError, message
from hybrid_strategy.parallelize import Parallelized
from hybrid_strategy.spec.layout import Layout
from hybrid_strategy.strategy.options import Options


@dataclass(frozen=True)
class MadeBefore:
    """What `parallelize` made of a module, and where."""

    made: Parallelized
    groups: Groups
    stage_cuts: tuple[int, ...] | None
    world: Any


_modules: WeakKeyDictionary[pl.LightningModule, MadeBefore] = WeakKeyDictionary()


def remember(module: pl.LightningModule, made: Parallelized, groups: Groups, stage_cuts: tuple[int, ...] | None) -> None:
    """Keeps in mind that `module` is parallelised."""
    _modules[module] = MadeBefore(made, groups, stage_cuts, _world())


def earlier_layout(module: pl.LightningModule) -> Layout | None:
    """The layout that an earlier Trainer has split `module` for."""
    before = _modules.get(module)
    return None if before is None else before.groups.layout


def recall(module: pl.LightningModule, layout: Layout, options: Options) -> MadeBefore | None:
    """What was made of `module`, or `None` where it is untouched.

    Raises:
        ModelError: it was made for another layout, or for processes that have been joined anew since.
        ConfigError: the weights that are there are to be others.
    """
    before = _modules.get(module)
    if before is None:
        return None
    now, then = _described(layout, options.stage_cuts), _described(before.groups.layout, before.stage_cuts)
    if now != then:
        raise ModelError(_refusal(module, f"it was {then}, now it is {now}"))
    if before.world is not _world():
        raise ModelError(_refusal(module, "the process group has been made anew since"))
    if options.initial_weights is not None:
        rule = "an earlier Trainer has given the module its weights, and a second one goes on with them, so it would be ignored"
        advice = "Leave it out of all but the first Trainer, or build the module anew"
        raise ConfigError(message("initial_weights", options.initial_weights, rule, "", advice))
    return before


def _world() -> Any:
    return dist.group.WORLD if dist.is_initialized() else None


def _described(layout: Layout, stage_cuts: tuple[int, ...] | None) -> str:
    cuts = "" if stage_cuts is None else f", stage_cuts={stage_cuts}"
    pipeline = (
        f", {layout.schedule}, {layout.stages_per_rank} stage{'' if layout.stages_per_rank == 1 else 's'} a rank"
        if layout.pipeline_parallel_size > 1
        else ""
    )
    replicas = f", {layout.replicate_size} replicas of a shard group" if layout.sharding != "ddp" else ""
    compiled = ", layers compiled" if layout.compile else ""
    return f"{layout.name}{replicas}{pipeline}, activation checkpoint {layout.activation_checkpoint}{compiled}{cuts}"


def _refusal(module: pl.LightningModule, numbers: str) -> str:
    rule = "an earlier Trainer has split it for other settings"
    advice = "Give the same settings to every Trainer, or build the module anew and load a checkpoint"
    return message("the module", type(module).__name__, rule, numbers, advice)
