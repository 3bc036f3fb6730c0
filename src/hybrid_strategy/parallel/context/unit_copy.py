"""A copy of a unit to try things on: the same code, weights of its own."""

from __future__ import annotations

from collections.abc import Hashable
from math import prod, sqrt
from typing import Any

import torch
from torch import Tensor, nn

_SCALE = 1.5
"""Outputs of a layer are so many times as large as its inputs: attention then tells positions apart."""

_SPREAD = 0.3
"""Of vectors around their usual value: 1 for a norm's weight, 0 for a bias."""


def signature_of(unit: nn.Module) -> Hashable:
    """The same for units that run the same code with the same settings and shapes."""
    return tuple(
        (
            name,
            type(module),
            _settings(module),
            tuple((key, each.shape) for key, each in module._parameters.items() if each is not None),
        )
        for name, module in unit.named_modules()
    )


def _settings(module: nn.Module) -> Hashable:
    plain = {key: value for key, value in vars(module).items() if isinstance(value, bool | int | float | str)}
    return tuple(sorted((key, repr(value)) for key, value in plain.items() if key != "training"))


def copy_with_large_weights(unit: nn.Module, kind: type[nn.Module], device: torch.device) -> nn.Module:
    """A copy in evaluation mode with random float32 weights, the same on every rank.

    Only shapes are read of the unit's parameters: they may have no values now. What was put around `forward` is left behind.

    Args:
        kind: the class of the copy.
    """
    generator = torch.Generator(device).manual_seed(0)
    return _copied(unit, kind, generator, {}).eval()


def _copied(module: nn.Module, kind: type[nn.Module], generator: torch.Generator, memo: dict[int, nn.Parameter]) -> nn.Module:
    copied = object.__new__(kind)
    vars(copied).update({key: value for key, value in vars(module).items() if key != "forward"})
    parameters: dict[str, Any] = {}
    for name, each in module._parameters.items():
        if each is not None and id(each) not in memo:
            memo[id(each)] = nn.Parameter(_values(name, each, generator), requires_grad=False)
        parameters[name] = None if each is None else memo[id(each)]
    buffers = {
        name: each.float() if each is not None and each.is_floating_point() else each for name, each in module._buffers.items()
    }
    children = {
        name: None if child is None else _copied(child, type(child), generator, memo) for name, child in module._modules.items()
    }
    vars(copied).update(_parameters=parameters, _buffers=buffers, _modules=children)
    return copied


def _values(name: str, parameter: Tensor, generator: torch.Generator) -> Tensor:
    values = torch.randn(parameter.shape, generator=generator, device=generator.device)
    if parameter.dim() < 2:
        return values * _SPREAD + (0.0 if "bias" in name else 1.0)
    return values * (_SCALE / sqrt(prod(parameter.shape[1:])))
