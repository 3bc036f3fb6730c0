"""Nested values without their tensors: what travels once, where the tensors travel often."""

from __future__ import annotations

import contextlib
import io
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass, is_dataclass
from typing import Any

import torch

from hybrid_strategy.parallel.trees import map_tensors


@dataclass(frozen=True)
class Leaf:
    """Stands for a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


def _is_leaf(value: Any) -> bool:
    return isinstance(value, Leaf)


def structure_of(value: Any) -> Any:
    """`value` with a `Leaf` in place of every tensor."""
    return map_tensors(lambda _, t: Leaf(tuple(t.shape), t.dtype, t.requires_grad), value)


def map_leaves(structure: Any, function: Callable[[Leaf], Any]) -> Any:
    """Replaces every `Leaf` of a structure by `function(leaf)`."""
    return map_tensors(lambda _, leaf: function(leaf), structure, is_leaf=_is_leaf)


def looks_of(structure: Any) -> list[Any]:
    """What a structure has at its ends: shapes and types of tensors, and plain values."""
    found: list[Any] = []

    def note(_: Any, end: Any) -> Any:
        found.append((end.shape, end.dtype) if isinstance(end, Leaf) else end)
        return end

    map_tensors(note, structure, is_leaf=lambda each: isinstance(each, _ENDS))
    return found


_ENDS = (Leaf, bool, int, float, str, type(None))


class Shapes:
    """What outputs of units look like, by the unit's number; passes through nested values as a whole.

    Attributes:
        of: structures. One that cannot be sent to another process is left out.
    """

    def __init__(self, of: dict[int, Any] | None = None) -> None:
        self.of = of or {}

    def __reduce__(self) -> tuple[Any, ...]:
        return Shapes, ({index: each for index, each in self.of.items() if _can_be_sent(each)},)

    def note(self, index: int, output: Any) -> None:
        """Notes what unit `index` has returned."""
        try:
            self.of[index] = structure_of(output)
        except Exception:  # a class of the user's that takes tensors only
            self.of.pop(index, None)


def _can_be_sent(structure: Any) -> bool:
    try:
        pickle.loads(pickle.dumps(structure))
    except Exception:  # whatever the user's object raises
        return False
    return True


def holder_of_tensors(value: Any) -> type | None:
    """The class of an object in a nested value that holds tensors which only it knows of; `None` where there is none."""
    return next((type(each) for each in _objects_in(structure_of(value)) if _holds_tensors(each)), None)


def _objects_in(structure: Any) -> list[Any]:
    found: list[Any] = []

    def note(end: Any) -> bool:
        if isinstance(end, _ENDS) or not (isinstance(end, Mapping | list | tuple) or is_dataclass(end)):
            if not isinstance(end, (*_ENDS, torch.dtype, torch.device, type)):
                found.append(end)
            return True
        return False

    map_tensors(lambda _, end: end, structure, is_leaf=note)
    return found


class _Finder(pickle.Pickler):
    found = False

    def persistent_id(self, each: Any) -> Any:
        self.found |= isinstance(each, torch.Tensor)
        return 0 if isinstance(each, torch.Tensor) else None


def _holds_tensors(value: Any) -> bool:
    finder = _Finder(io.BytesIO())
    with contextlib.suppress(Exception):  # what cannot be sent fails when it is
        finder.dump(value)
    return finder.found
