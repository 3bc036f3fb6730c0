"""Layers under `torch.compile`, each by itself, in place: no name, hook, gate or checkpoint key changes.

What is compiled is a layer's `forward`, with the collectives of tensor parallelism in it. What steers a layer stays outside and
runs as it is: gates of a pipeline, gathers of `zero3`, hooks, and `full` recomputation, which runs the compiled code again. Only
`selective` recomputation is compiled with the layer, because what it keeps are operations, which compiled code does not show.
Layers that run the same code share what was compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._dynamo import OptimizedModule, config
from torch._dynamo.exc import Unsupported

from hybrid_strategy.errors import ModelError, message
from hybrid_strategy.parallel.stand_ins import StandIn
from hybrid_strategy.parallel.wrapping import Around, Wrapped, as_it_is
from hybrid_strategy.spec.layout import Layout

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
    config.nontraceable_tensor_subclasses.add(StandIn)  # a function that the model's own code compiles may be given one
    config.skip_nnmodule_hook_guards = False  # else hooks that come or go later, on modules within a layer, are not noticed
    for unit in units:
        compiled = torch.compile(unit.forward, **settings)
        unit.forward = Wrapped(unit.forward, _explained(compiled, type(unit).__name__) if whole else _plain(compiled), as_it_is)


def _plain(compiled: Callable[..., Any]) -> Around:
    return lambda forward, *args, **kwargs: compiled(*args, **kwargs)


def _explained(compiled: Callable[..., Any], layer: str) -> Around:
    """`compiled`, whose graph may have no breaks, with a refusal that says what to set."""

    def explained(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return compiled(*args, **kwargs)
        except Unsupported as error:
            rule = "with activation_checkpoint=selective every layer must compile as one graph"
            numbers = f"{layer}: {_cause(error)}"
            advice = "Set false, or activation_checkpoint=full or none"
            raise ModelError(message("compile", True, rule, numbers, advice)) from error

    return explained


def _cause(error: Exception) -> str:
    """The first line of torch's long text, and the line that says what it met."""
    first, *rest = (line.strip() for line in str(error).strip().splitlines())
    context = next((line.partition(": ")[2] for line in rest if line.startswith("Developer debug context: ")), "")
    return f"{first} ({context})" if context else first


@contextmanager
def uncompiled() -> Iterator[None]:
    """Runs layers as they are written meanwhile, so that hooks see what goes on inside of them without a compilation for it."""
    with torch.compiler.set_stance("force_eager"):
        yield


def refuse_compiled(module: nn.Module, layout: Layout) -> None:
    """Refuses compiled modules where their calls are changed afterwards: compiled code would go past the change.

    Raises:
        ModelError: a module was given to `torch.compile`, and layers are cut, sliced or gathered, or their sequences are.
    """
    gathers = layout.sharding == "zero3" and layout.state_shards > 1
    inner = layout.pipeline_parallel_size * layout.tensor_parallel_size * layout.context_parallel_size
    if inner == 1 and not gathers:
        return
    for name, each in module.named_modules():
        if isinstance(each, OptimizedModule) or each._compiled_call_impl is not None:
            rule = "compiled code would not see that its layers are cut, sliced or gathered"
            numbers, advice = f"The layout is {layout.name}", "Leave torch.compile out, or use ddp, zero1 or zero2 alone"
            raise ModelError(message("torch.compile", name or type(module).__name__, rule, numbers, advice))
