"""Shows every parameter of the un-split model with its whole shape, for code that counts: summaries."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import lightning.pytorch as pl
import torch
from torch import nn

from hybrid_strategy.parallel.stages import whole_model_shown
from hybrid_strategy.parallelize import Parallelized


@contextmanager
def whole_shapes_shown(module: pl.LightningModule, made: Parallelized) -> Iterator[None]:
    """Within it the module has the parameters of the un-split model, without values; its forward pass must not be run."""
    example, module.example_input_array = module.example_input_array, None
    for slot in made.slots:
        held = made.sharding.optimizer_parameter(slot)
        shape = made.shapes.get(slot.name, tuple(slot.spec.full_shape))
        slot.put(nn.Parameter(torch.empty(shape, dtype=held.dtype, device="meta"), requires_grad=held.requires_grad))
    try:
        with whole_model_shown(module):
            yield
    finally:
        module.example_input_array = example
        for slot in made.slots:
            slot.put(made.sharding.optimizer_parameter(slot))
