"""Nested values without their tensors: what travels once, where the tensors travel often."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
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
        self.of[index] = structure_of(output)


def _can_be_sent(structure: Any) -> bool:
    try:
        pickle.dumps(structure)
    except Exception:  # whatever the user's object raises
        return False
    return True
