"""What stands for values of earlier stages, told from real ones: a step may compute with it, but not make its results of it.

A model's `forward` runs on every stage and computes what it likes of the outputs of units that are not there, as long as it comes
to nothing. Each stand-in knows the unit whose output it stands for, and so does what is computed of it: so a unit that is given
such a value, and a step that returns or logs it, can be told which output is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from hybrid_strategy.parallel.marked import MarkedTensor, call_plainly, makes_of_values
from hybrid_strategy.parallel.structures import Leaf, map_leaves
from hybrid_strategy.parallel.trees import has_nan, iterate_tensors, map_tensors


class StandIn(MarkedTensor):
    """What is computed of it is one, too.

    Attributes:
        origins: numbers of the units whose outputs it is made of.
        sure: its values are made of theirs; else only NaN in it tells so, as it may have taken no more than a shape.
    """

    origins: frozenset[int]
    sure: bool

    @classmethod
    def computed(cls, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        try:
            result = call_plainly(func, args, kwargs)
        except Exception as error:
            note_origins(error, origins_in((args, kwargs)))
            raise
        return _inherited(getattr(func, "__name__", ""), result, (args, kwargs))


def _inherited(name: str, result: Any, given: Any) -> Any:
    """The result of a function on stand-ins, as what is made of them."""
    if not makes_of_values(name, result):
        return result
    if name == "to" or name.endswith("_as"):  # the others are there for their shape or type
        given = given[0][0]
    values = bool(origins_used(given))

    def mark(_: Any, tensor: Tensor) -> Tensor:
        sure = values and (not (tensor.is_floating_point() or tensor.is_complex()) or _is_sure(given))
        return made_of(tensor, origins_in(given), sure) if type(tensor) is Tensor else tensor

    return map_tensors(mark, result)


def _is_sure(given: Any) -> bool:
    return any(isinstance(each, StandIn) and each.sure for each in iterate_tensors(given))


def made_of(tensor: Tensor, origins: Iterable[int], sure: bool) -> Tensor:
    """The same tensor as a stand-in."""
    stand_in: Any = tensor.as_subclass(StandIn)
    stand_in.origins, stand_in.sure = frozenset(origins), sure
    return stand_in  # type: ignore[no-any-return]


def origins_in(value: Any) -> frozenset[int]:
    """Units of whose outputs the stand-ins of a nested value are made."""
    found = frozenset[int]()
    for each in iterate_tensors(value):
        if isinstance(each, StandIn):
            found |= each.origins
    return found


def origins_used(value: Any) -> frozenset[int]:
    """The same, of those whose values are made of these outputs, and not only their shapes."""
    found = frozenset[int]()
    for each in iterate_tensors(value):
        if isinstance(each, StandIn) and (each.sure or has_nan(each.as_subclass(Tensor))):
            found |= each.origins
    return found


def note_origins(error: Exception, origins: frozenset[int]) -> None:
    """Lets an error that torch raised of stand-ins tell so."""
    error.__dict__.setdefault("made_of_units", origins)


def origins_of_error(error: BaseException) -> frozenset[int]:
    """Units of whose outputs what torch failed on was made."""
    return error.__dict__.get("made_of_units", frozenset())  # type: ignore[no-any-return]


def stand_in_for(structure: Any, device: torch.device | None, memory: dict[Leaf, Tensor]) -> Any:
    """NaN, and zeros where there is none, in the place of every tensor; what looks alike shares memory."""

    def fill(leaf: Leaf) -> Tensor:
        if leaf not in memory:
            value = float("nan") if leaf.dtype.is_floating_point or leaf.dtype.is_complex else 0
            memory[leaf] = torch.full(leaf.shape, value, dtype=leaf.dtype, device=device)
        return memory[leaf]

    return map_leaves(structure, fill)


def marked(value: Any, index: int) -> Any:
    """The nested value with stand-ins for unit `index` for its plain tensors."""

    def mark(_: Any, tensor: Tensor) -> Tensor:
        return (
            made_of(tensor, [index], not (tensor.is_floating_point() or tensor.is_complex()))
            if type(tensor) is Tensor
            else tensor
        )

    return map_tensors(mark, value)
