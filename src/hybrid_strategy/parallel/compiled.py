"""Layers under `torch.compile`, each by itself, in place: no name, hook, gate or checkpoint key changes.

What is compiled is a layer's `forward`, with the collectives of tensor parallelism in it. What steers a layer stays outside and
runs as it is: gates of a pipeline, gathers of `zero3`, hooks, and `full` recomputation, which runs the compiled code again. Only
`selective` recomputation is compiled with the layer, because what it keeps are operations, which compiled code does not show.
Layers that run the same code share what was compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch._dynamo.exc import Unsupported

from hybrid_strategy.errors import ModelError, message

BACKEND = "inductor"

_OPTIONS: dict[str, Any] = {"fallback_random": True}
"""Dropout draws what it draws without compilation, from the random state that says which ranks share a mask."""

_VARIANTS = 8
"""So often may a layer's code be compiled for other shapes, modes or settings (torch's own limit, which counts all layers)."""


def compile_units(units: Sequence[nn.Module], whole: bool) -> None:
    """Gives the `forward` of each unit to `torch.compile`; before what gathers parameters is put around it.

    Args:
        whole: a unit must compile as one graph, else its parts may run as they are in between.
    """
    settings: dict[str, Any] = {"backend": BACKEND, "options": _OPTIONS if BACKEND == "inductor" else None, "fullgraph": whole}
    settings["recompile_limit"] = _VARIANTS * len(units)  # they share one code, and may differ in a number that it reads
    for unit in units:
        forward = torch.compile(unit.forward, **settings)
        unit.forward = _explained(forward, type(unit).__name__) if whole else forward


def _explained(forward: Callable[..., Any], layer: str) -> Callable[..., Any]:
    """`forward`, whose graph may have no breaks, with a refusal that says what to set."""

    @wraps(forward)
    def explained(*args: Any, **kwargs: Any) -> Any:
        try:
            return forward(*args, **kwargs)
        except Unsupported as error:
            rule = "with activation_checkpoint=selective every layer must compile as one graph"
            numbers = f"{layer}: {str(error).strip().splitlines()[0]}"
            advice = "Set false, or activation_checkpoint=full or none"
            raise ModelError(message("compile", True, rule, numbers, advice)) from error

    return explained
