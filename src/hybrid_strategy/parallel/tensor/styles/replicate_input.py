"""`replicate_input`: the one point of a sub-block where its input becomes whole; backward, the sub-block's one all-reduce."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn

from hybrid_strategy.parallel.tensor.collectives import copy_to_region
from hybrid_strategy.parallel.tensor.random import draws_random_numbers
from hybrid_strategy.parallel.tensor.region import Region
from hybrid_strategy.parallel.tensor.styles._style import Style

_Args = tuple[Any, ...]
_Kwargs = dict[str, Any]


def _enter(region: Region, module: nn.Module, args: _Args, kwargs: _Kwargs) -> tuple[_Args, _Kwargs]:
    """The first floating-point tensor is the hidden state; others with a gradient (an encoder's output) are whole already."""
    seen = False

    def convert(value: Any) -> Any:
        nonlocal seen
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        if not seen:
            seen = True
            return region.enter(value)
        return copy_to_region(value, region.group) if value.requires_grad else value

    return tuple(convert(value) for value in args), {key: convert(value) for key, value in kwargs.items()}


def _own_random_numbers(region: Region, module: nn.Module, args: _Args, kwargs: _Kwargs) -> None:
    if module.training:
        tensor = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        region.random.enter(tensor.device)


def _common_random_numbers(region: Region, module: nn.Module, args: _Args, output: Any) -> None:
    """Where no rowwise layer has been reached: recomputation stops early, or forward failed."""
    region.random.leave()


class ReplicateInput(Style):
    name = "replicate_input"

    def install(self, module: nn.Module, region: Region, inside: bool) -> None:
        if inside:
            return
        module.register_forward_pre_hook(partial(_enter, region), with_kwargs=True)
        if draws_random_numbers(module):
            module.register_forward_pre_hook(partial(_own_random_numbers, region), with_kwargs=True)
            module.register_forward_hook(partial(_common_random_numbers, region), always_call=True)


PART = ReplicateInput()
