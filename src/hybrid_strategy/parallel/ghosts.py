"""Ghosts: what a unit of another pipeline rank looks like, without its memory.

Code that looks at the whole model (parameter groups by name or by layer type, unfreezing, summaries) must decide the same on all
ranks. While it runs, units of other ranks are shown as ghosts: the same modules, names, types and shapes, with parameters that
are one NaN seen in every place.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hybrid_strategy.parallel.parameters import copy_attributes

_MARK = "_hybrid_strategy_ghost"


def ghost_of(module: nn.Module, memo: dict[int, nn.Parameter]) -> nn.Module:
    """A copy of `module` whose tensors have no memory.

    Args:
        module: what to copy.
        memo: parameters by the identity of those they stand for. A parameter that this rank holds elsewhere, because it is
            tied, stands for itself.
    """
    copied = object.__new__(type(module))
    vars(copied).update(vars(module))
    parameters = {name: None if each is None else _ghost_parameter(each, memo) for name, each in module._parameters.items()}
    buffers = {name: None if each is None else _bare(each) for name, each in module._buffers.items()}
    children = {name: None if each is None else ghost_of(each, memo) for name, each in module._modules.items()}
    vars(copied).update(_parameters=parameters, _buffers=buffers, _modules=children)
    hooks = module._load_state_dict_pre_hooks.items()
    vars(copied)["_load_state_dict_pre_hooks"] = OrderedDict((key, _bound_anew(hook, module, copied)) for key, hook in hooks)
    return copied


def _bound_anew(hook: Any, module: nn.Module, ghost: nn.Module) -> Any:
    """Torch binds these hooks to their module, which is about to go; a method as a hook would keep its weights."""
    function = hook.hook
    if getattr(function, "__self__", None) is module:
        function = MethodType(function.__func__, ghost)
    return type(hook)(function, ghost if hook.with_module else None)


def _ghost_parameter(parameter: nn.Parameter, memo: dict[int, nn.Parameter]) -> nn.Parameter:
    if id(parameter) not in memo:
        ghost = memo[id(parameter)] = nn.Parameter(_bare(parameter), requires_grad=parameter.requires_grad)
        copy_attributes(parameter, ghost)
        setattr(ghost, _MARK, True)
    return memo[id(parameter)]


def _bare(tensor: Tensor) -> Tensor:
    filled = float("nan") if tensor.is_floating_point() or tensor.is_complex() else 0
    return torch.full((), filled, dtype=tensor.dtype).expand(tensor.shape)


def is_ghost(parameter: object) -> bool:
    return getattr(parameter, _MARK, False)


@contextmanager
def shown(places: list[tuple[nn.Module, str, nn.Module]]) -> Iterator[None]:
    """Puts ghosts in their places `(parent, child's name, ghost)` for a while."""
    absent = [(parent, name, parent._modules[name]) for parent, name, _ in places]
    for parent, name, ghost in places:
        parent._modules[name] = ghost
    try:
        yield
    finally:
        for parent, name, module in absent:
            parent._modules[name] = module


def leave_out_ghosts(optimizer: Optimizer) -> None:
    """Takes ghosts out of an optimizer; a group that is left empty stays, so that groups have the same numbers on all ranks."""
    for group in optimizer.param_groups:
        kept = [index for index, each in enumerate(group["params"]) if not is_ghost(each)]
        for key in ("params", "param_names"):
            if key in group:
                group[key] = [group[key][index] for index in kept]
    for parameter in [each for each in optimizer.state if is_ghost(each)]:
        del optimizer.state[parameter]
