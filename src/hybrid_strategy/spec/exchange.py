"""How a family's weights are called in Hugging Face's files: what its door offers to export and import."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hybrid_strategy.spec.model_shape import ModelShape


@dataclass(frozen=True)
class ForeignTensor:
    """Where one parameter lies.

    Attributes:
        name: of the tensor there.
        transposed: its two dimensions are exchanged there (GPT-2's `Conv1D`).
        part: (index, count): it is this one of `count` equal parts, joined along its first dimension.
        again: it is there under another parameter's name already (a tied head), so it is read from there and not written.
    """

    name: str
    transposed: bool = False
    part: tuple[int, int] = (0, 1)
    again: bool = False


@dataclass(frozen=True)
class Exchange:
    """A family's counterpart in Hugging Face's library.

    Attributes:
        architecture: the class there, as `config.json` names it.
        config: (shape, options of the model) -> what `config.json` holds. Raises ModelError where that class cannot be like it.
        free: keys of `config.json` that may differ where the same weights compute the same.
        absent: keys that must be missing or empty: what they ask for the family cannot do.
        tensor: (name of a parameter in the model, shape) -> where it lies; None: nowhere.
    """

    architecture: str
    config: Callable[[ModelShape, Mapping[str, Any]], dict[str, Any]]
    tensor: Callable[[str, ModelShape], ForeignTensor | None]
    free: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()

    def differences(self, given: Mapping[str, Any], shape: ModelShape, options: Mapping[str, Any]) -> list[str]:
        """What `config.json` says of the weights beside it that is otherwise in this model, so that they would compute other
        values here; a key that only one of the two has says nothing.

        Args:
            given: what `config.json` holds.
        """
        known = {"architectures", "torch_dtype", "dtype", *self.free}
        here = {key: value for key, value in _flat(self.config(shape, options)).items() if key not in known}
        there = _flat(given)
        found = [
            f"{key} {there[key]} there, {here[key]} here" for key in here if key in there and not _same(there[key], here[key])
        ]
        return found + [f"{key} {given[key]} there, nothing of it here" for key in self.absent if given.get(key)]


def _flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """With what is nested one level up: `rope_theta` is found in either place."""
    nested = {inner: each for value in values.values() if isinstance(value, Mapping) for inner, each in value.items()}
    return {key: value for key, value in values.items() if not isinstance(value, Mapping)} | nested


def _same(first: Any, second: Any) -> bool:
    numbers = all(isinstance(each, int | float) for each in (first, second))
    return first is None or (math.isclose(first, second, rel_tol=1e-6) if numbers else first == second)
