"""`Trainer(strategy="hybrid")`: the layout follows from the module and the memory, once both are there."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.utilities import rank_zero_info

from hybrid_strategy.errors import ConfigError
from hybrid_strategy.planning.bare import bare_layout
from hybrid_strategy.planning.numerics import NUMERICS, Numerics, numerics_of
from hybrid_strategy.spec.layout import Layout
from hybrid_strategy.strategy.counting import as_built, count_parameters, told_shape
from hybrid_strategy.strategy.made_before import earlier_layout
from hybrid_strategy.strategy.options import Options

_AXES = (
    "data_parallel_size",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "context_parallel_size",
    "sharding",
    "sequence_parallel",
    "schedule",
    "activation_checkpoint",
)


def decided(strategy: ParallelStrategy, options: Options, module: pl.LightningModule) -> Options:
    """The options with the first rank's choice of a layout, the same on every rank; collective where there are several."""
    before = earlier_layout(module)
    if before is not None:  # what is left of it here tells nothing of the whole
        return with_layout(options, before)
    world = dist.get_world_size() if dist.is_initialized() else 1
    box: list[Any] = [None]
    if not dist.is_initialized() or dist.get_rank() == 0:
        seen = as_built(module)
        here = 1 if strategy.root_device.type == "cuda" else len(strategy.parallel_devices or ())
        memory, precision = _memory_bytes(strategy.root_device) / max(1, here), str(strategy.precision_plugin.precision)
        box = [bare_layout(count_parameters(seen), world, memory, _numerics(precision), told_shape(seen))]
    if world > 1:
        dist.broadcast_object_list(box, src=0)
    layout, why = box[0]
    rank_zero_info(f"strategy='hybrid': {why}")
    return with_layout(options, layout)


def with_layout(options: Options, layout: Layout) -> Options:
    """The options of a layout."""
    chosen = {axis: getattr(layout, axis) for axis in _AXES}
    return replace(options, **chosen, stages_per_rank=layout.stages_per_rank if layout.pipeline_parallel_size > 1 else None)


def _numerics(precision: str) -> Numerics:
    try:
        return numerics_of(precision)
    except ConfigError:
        return NUMERICS["fp32"]


def _memory_bytes(device: torch.device) -> float:
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
