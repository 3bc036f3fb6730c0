"""What stands for values of earlier stages, told from real ones: a step may compute with it, but not make its results of it.

A model's `forward` runs on every stage and computes what it likes of the outputs of units that are not there, as long as it comes
to nothing. Each stand-in knows the unit whose output it stands for, and so does what is computed of it: so a unit that is given
such a value, and a step that returns or logs it, can be told which output is missing. Nothing is known any more of a number of
Python that is read from one (`if x.max() > 3`, `.item()`), nor after an error of its missing values that the model itself
catches: both are told at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from hybrid_strategy.parallel.marked import PASSES_THROUGH, MarkedTensor, call_plainly, fails_on_shapes, makes_of_values
from hybrid_strategy.parallel.shell import operation_name
from hybrid_strategy.parallel.structures import Leaf, map_leaves
from hybrid_strategy.parallel.trees import has_nan, iterate_tensors, map_tensors

Told = Callable[[str, frozenset[int]], None]
"""Is told what is done with unknown values of these units, where nobody can follow what comes of it."""

_READS = (
    *("__bool__", "__int__", "__float__", "__complex__", "__index__", "__contains__"),
    *("is_nonzero", "item", "tolist", "numpy", "equal", "allclose"),
)
"""Make numbers of Python of values."""
_OVERFLOWS = ("isinf", "isposinf", "isneginf")
"""Are answered with no, of NaN as well as of usual values."""


class StandIn(MarkedTensor):
    """What is computed of it is one, too.

    Attributes:
        origins: numbers of the units whose outputs it is made of.
        sure: its values are made of theirs; else only NaN in it tells so, as it may have taken no more than a shape.
        unknown: its values come of such that nobody knows; others (lengths, ids) are as usual ones.
        told: is told of uses that nobody can follow.
    """

    origins: frozenset[int]
    sure: bool
    unknown: bool
    told: Told

    @classmethod
    def computed(cls, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        name, given = operation_name(func), (args, kwargs)
        if name in _OVERFLOWS:
            return call_plainly(func, args, kwargs)
        if name in _READS and (origins := _unknown_in(given)):
            _telling(given)(f"its forward reads ({name.strip('_')})", origins)
        try:
            result = call_plainly(func, args, kwargs)
        except PASSES_THROUGH:
            raise
        except Exception as error:
            note_origins(error, origins_in(given))
            if not fails_on_shapes(func, args, kwargs, error):
                _telling(given)(how_it_fails(error), origins_in(given))
            raise
        return _inherited(name, result, given)


def _inherited(name: str, result: Any, given: Any) -> Any:
    """The result of a function on stand-ins, as what is made of them."""
    if not makes_of_values(name, result):
        return result
    if name == "to" or name.endswith("_as"):  # the others are there for their shape or type
        given = given[0][0]
        if not isinstance(given, StandIn):
            return result
    values, unknown, told = bool(origins_used(given)), bool(_unknown_in(given)), _telling(given)

    def mark(_: Any, tensor: Tensor) -> Tensor:
        sure = values and (not _may_be_nan(tensor) or _is_sure(given))
        return made_of(tensor, origins_in(given), sure, unknown, told) if type(tensor) is Tensor else tensor

    return map_tensors(mark, result)


def _may_be_nan(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _unknown_in(given: Any) -> frozenset[int]:
    """Units of whose unknown values something is made."""
    found = frozenset[int]()
    for each in iterate_tensors(given):
        if isinstance(each, StandIn) and each.unknown:
            found |= origins_used(each)
    return found


def _telling(given: Any) -> Told:
    return next(each.told for each in iterate_tensors(given) if isinstance(each, StandIn))


def how_it_fails(error: Exception) -> str:
    return f"its forward fails ({type(error).__name__}: {error}) on"


def _is_sure(given: Any) -> bool:
    return any(isinstance(each, StandIn) and each.sure for each in iterate_tensors(given))


def made_of(tensor: Tensor, origins: Iterable[int], sure: bool, unknown: bool, told: Told) -> Tensor:
    """The same tensor as a stand-in."""
    stand_in: Any = tensor.as_subclass(StandIn)
    stand_in.origins, stand_in.sure, stand_in.unknown, stand_in.told = frozenset(origins), sure, unknown, told
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


def marked(value: Any, index: int, told: Told) -> Any:
    """The nested value with stand-ins for unit `index` for its plain tensors."""

    def mark(_: Any, tensor: Tensor) -> Tensor:
        lost = _may_be_nan(tensor)
        return made_of(tensor, [index], not lost, lost, told) if type(tensor) is Tensor else tensor

    return map_tensors(mark, value)
