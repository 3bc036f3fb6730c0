"""How a family's weights are called in Hugging Face's files: what its door offers to export and import."""

from __future__ import annotations

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
        tensor: (name of a parameter in the model, shape) -> where it lies; None: nowhere.
    """

    architecture: str
    config: Callable[[ModelShape, Mapping[str, Any]], dict[str, Any]]
    tensor: Callable[[str, ModelShape], ForeignTensor | None]
