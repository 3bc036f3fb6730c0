"""The backward pass in two halves, for zero-bubble schedules: gradients of the inputs now, of the weights later.

The only file that imports torch's private `torch.distributed.pipelining._backward` (2.13; it has no public name yet).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.nn import Parameter


@dataclass
class WeightWork:
    """What is left to do for a stage and micro-batch after its input half."""

    weights: list[Parameter]
    groups: list[dict[str, Any]]
    outputs: list[Tensor]
    gradients: list[Tensor | None]


def backward_input(
    outputs: list[Tensor], gradients: Sequence[Tensor | None], inputs: list[Tensor], weights: list[Parameter]
) -> WeightWork:
    """Gradients of `inputs` (into their `.grad`). Where no input wants one, as on the first stage, all is left for later."""
    if not outputs or not inputs:
        return WeightWork(weights, [], outputs, list(gradients))
    filled = [torch.ones_like(out) if grad is None else grad for out, grad in zip(outputs, gradients, strict=True)]
    # torch detaches the outputs in place, which views do not allow: a Linear's output of three dimensions is one
    with torch.enable_grad():
        roots = [out.clone() if out._is_view() else out for out in outputs]
    _, groups = stage_backward_input(roots, filled, inputs, iter(weights))
    return WeightWork(weights, groups, [], [])


def backward_weight(work: WeightWork) -> None:
    """Gradients of the weights, added to their `.grad`."""
    if work.outputs:
        torch.autograd.backward(work.outputs, work.gradients)
    elif work.groups:
        stage_backward_weight(iter(work.weights), work.groups)
