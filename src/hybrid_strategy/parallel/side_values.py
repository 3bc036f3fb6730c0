"""Values that layers keep beside their output for the loss (a router's balance, features of a hook): lost in a pipeline.

The step's loss is made on the last stage, and only the output of a stage gets there. A layer of an earlier stage that keeps a
tensor on itself keeps it on another rank, and the loss silently goes without it. Most kept tensors are for looking at only, so
what counts is what the loss does with those of the last stage: the graph of the loss is followed, but not through the output of
the model's last unit. What it meets there was taken from the side.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from hybrid_strategy.errors import ModelError, message
from hybrid_strategy.parallel.shell import Shell
from hybrid_strategy.parallel.trees import has_nan, iterate_tensors

Place = tuple[str, str]
"""A class and an attribute."""

_SEQUENCES = (list, tuple)
_PLAIN = {bool, int, float, str, type(None)}
"""Most of what a layer keeps: nothing to look into."""


def kept_values(units: Sequence[nn.Module], module: nn.Module) -> dict[Place, list[Tensor]]:
    """Tensors with a graph that layers of `units` keep, and what `module`, the user's, keeps of what these have made."""
    found = _kept(each for unit in units for each in unit.modules())
    weights = {id(weight) for unit in units for weight in unit.parameters()}
    for place, tensors in _kept([module]).items():
        if any(id(getattr(node, "variable", None)) in weights for node in _graph(tensors, set())):
            found[place] = tensors
    return found


def taken_from_the_side(loss: Tensor, output: Any, kept: Mapping[Place, list[Tensor]]) -> list[Place]:
    """Places whose values the loss uses otherwise than through `output`, that of the model's last unit."""
    ends = set[Any]()
    for each in iterate_tensors(output):
        ends.update({each.grad_fn, each.local.grad_fn} if isinstance(each, Shell) else {each.grad_fn})
    reached = set(_graph([loss], ends))
    return [place for place, tensors in kept.items() if any(each.grad_fn in reached for each in tensors)]


def _kept(modules: Iterable[nn.Module]) -> dict[Place, list[Tensor]]:
    found: dict[Place, list[Tensor]] = {}
    for module in modules:
        for name, value in vars(module).items():
            if type(value) in _PLAIN or name.startswith("_"):
                continue
            held = value if isinstance(value, _SEQUENCES) else value.values() if isinstance(value, dict) else [value]
            tensors = [each for each in held if isinstance(each, Tensor) and each.grad_fn is not None]
            if tensors:
                found.setdefault((type(module).__name__, name), []).extend(tensors)
    return found


def _graph(tensors: Iterable[Tensor], ends: set[Any]) -> Iterator[Any]:
    """The nodes of autograd's graph behind `tensors`, as far as `ends`, which are left out."""
    todo: list[Any] = [each.grad_fn for each in tensors]
    seen = {None, *ends}
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        yield node
        todo += [each for each, _ in node.next_functions]


def unset_buffers(module: nn.Module, within: tuple[str, ...]) -> set[str]:
    """Names of buffers that hold NaN, and do not begin with one of `within`."""
    named = [(name, each) for name, each in module.named_buffers() if not name.startswith(within)]
    return {name for name, each in named if not each.is_meta and has_nan(each.as_subclass(Tensor))}


def lost_in_buffers(names: Sequence[str]) -> list[ModelError]:
    """Refusals of buffers between units that a step has filled with what stands for values of other stages."""
    rule = "its forward writes to it what a unit of another pipeline stage has made, and the value is not here"
    advice = "Write to a buffer of the unit itself, inside of its forward, or set pipeline_parallel_size=1"
    return [ModelError(message("buffer", name, rule, "", advice)) for name in names]
