"""What the decoder families share: the check of their heads, and how a parameter's first values are drawn."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from hybrid_strategy.errors import ModelError, message
from hybrid_strategy.spec.families import shape_refusal
from hybrid_strategy.spec.model_shape import ModelShape

INITIAL_STD = 0.02
"""GPT-2's and Llama's standard deviation of weights."""


def check_shape(shape: ModelShape, family: str) -> None:
    """Refuses sizes that `family` cannot be built in.

    Raises:
        ModelError: by the field of the shape.
    """
    refusal = shape_refusal(replace(shape, family=family))
    if refusal is not None:
        raise ModelError(message(f"model.shape.{refusal[0]}", *refusal[1:]))


def init_parameter(name: str, tensor: Tensor, generator: torch.Generator, num_layers: int, residual: tuple[str, ...]) -> None:
    """Fills one whole parameter in place: ones for norms, zeros for biases, else normal values.

    Matrices that write to the residual stream are scaled by 1/sqrt(2 num_layers), one for each of the 2 num_layers additions
    (GPT-2 report, section 2.3).

    Args:
        residual: names of the layers that write to the residual stream.
    """
    owner, _, kind = name.rpartition(".")
    with torch.no_grad():
        if kind == "bias":
            tensor.zero_()
        elif tensor.dim() == 1:
            tensor.fill_(1.0)
        else:
            scale = 1 / math.sqrt(2 * num_layers) if owner.rpartition(".")[2] in residual else 1.0
            # drawn in float32 whatever the precision, so that bfloat16 starts from the rounded values of float32
            drawn = tensor if tensor.dtype == torch.float32 else torch.empty(tensor.shape)
            drawn.normal_(0.0, INITIAL_STD * scale, generator=generator)
            if drawn is not tensor:
                tensor.copy_(drawn)
