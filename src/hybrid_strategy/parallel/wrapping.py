"""A module's `forward` with something around it, that follows the module into a copy.

A function set on a module stays that of the original when the module is copied (a teacher, a target network), and the copy would
compute with the original's weights without a word. A bound method is copied with its module.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import update_wrapper
from typing import Any

Forward = Callable[..., Any]
Around = Callable[..., Any]
"""Called with the inner `forward` and its arguments."""


class Wrapped:
    """Stands for a module's `forward`.

    Args:
        forward: the inner one: a bound method, or another of these.
        around: what is called instead.
        in_copies: what is called instead in a copy of the module; default: the same.
    """

    def __init__(self, forward: Forward, around: Around, in_copies: Around | None = None) -> None:
        update_wrapper(self, forward)
        self._forward, self._around, self._in_copies = forward, around, in_copies

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._around(self._forward, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Wrapped:
        return Wrapped(copy.deepcopy(self._forward, memo), self._in_copies or self._around)


def as_it_is(forward: Forward, *args: Any, **kwargs: Any) -> Any:
    """Nothing is around it."""
    return forward(*args, **kwargs)
