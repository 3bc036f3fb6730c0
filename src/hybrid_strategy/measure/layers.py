"""Seconds of each unit of a model, forward and backward, over one micro-batch on one device."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from hybrid_strategy.parallel.trees import map_tensors, tensors_of
from hybrid_strategy.parallel.units import find_units

ROUNDS = 7


def unit_seconds(root: nn.Module, patterns: Sequence[str], call: Callable[[], object], device: torch.device) -> dict[str, float]:
    """Both passes of every unit, in the order of the model.

    Args:
        root: the submodule that is cut.
        patterns: its units (`ParallelPlan.units`).
        call: runs the model once, so that each unit shows what it is given.
    """
    names = find_units(root, patterns)
    given = _inputs({name: root.get_submodule(name) for name in names}, call)
    return {name: _seconds(root.get_submodule(name), *given[name], device) if name in given else 0.0 for name in names}


def _inputs(units: dict[str, nn.Module], call: Callable[[], object]) -> dict[str, tuple[Any, Any]]:
    found: dict[str, tuple[Any, Any]] = {}
    handles = []
    for name, unit in units.items():

        def note(_: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
            found.setdefault(name, (args, kwargs))

        handles.append(unit.register_forward_pre_hook(note, with_kwargs=True))
    try:
        with torch.no_grad():
            call()
    finally:
        for handle in handles:
            handle.remove()
    return found


def _seconds(unit: nn.Module, args: Any, kwargs: Any, device: torch.device) -> float:
    args, kwargs = map_tensors(lambda _, tensor: _leaf(tensor), (args, kwargs))
    times = []
    for _ in range(ROUNDS):
        begin = _now(device)
        outputs = [each for _, each in tensors_of(unit(*args, **kwargs)) if each.requires_grad]
        if outputs:
            torch.autograd.backward(outputs, [torch.ones_like(each) for each in outputs])
        times.append(_now(device) - begin)
        unit.zero_grad(set_to_none=True)
    return median(times[1:])


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.is_floating_point())


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
