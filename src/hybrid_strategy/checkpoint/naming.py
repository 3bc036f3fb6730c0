"""How weights are called and laid out in somebody else's files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hybrid_strategy.checkpoint.pieces import MODEL, section


def bare_name(key: str) -> str | None:
    """`model.<name>` is called `<name>`; what is not a weight has no name."""
    return key.partition(".")[2] if section(key) == MODEL else None


def whole(key: str) -> tuple[int, int]:
    """Every tensor is one of its own."""
    return 0, 1


def never(key: str) -> bool:
    """No tensor is transposed."""
    return False


@dataclass(frozen=True)
class Naming:
    """The other side's name of a key.

    Attributes:
        rename: the name of a key there; None if it has no place there (optimizer states, the second name of a tied weight).
            Two keys may be read from one name.
        part: (index, count): which of `count` equal parts of the tensor there it is, joined along the key's first dimension
            (GPT-2's query, key and value).
        transposed: whether the matrix lies there with its two dimensions exchanged (GPT-2's `Conv1D`).
    """

    rename: Callable[[str], str | None] = bare_name
    transposed: Callable[[str], bool] = never
    part: Callable[[str], tuple[int, int]] = whole
