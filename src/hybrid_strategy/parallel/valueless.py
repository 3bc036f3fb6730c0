"""Parameters that have no values at the moment: they answer for shape, type and device, and notice when their values are used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hybrid_strategy.parallel.shell import METADATA
from hybrid_strategy.parallel.trees import iterate_tensors

_ABOUT = METADATA | frozenset(
    [
        *(
            accessor
            for name in ("grad", "requires_grad")
            for accessor in (getattr(Tensor, name).__set__, getattr(Tensor, name).__delete__)
        ),
        *(getattr(Tensor, name).__get__ for name in ("grad", "grad_fn", "is_leaf")),
        *(getattr(Tensor, name) for name in ("requires_grad_", "untyped_storage", "register_hook")),
    ]
)
"""What works without values."""


class Valueless(nn.Parameter):
    """A parameter takes this class (`lose`) while it has no values, and is a plain one again afterwards (`regain`).

    Attributes:
        needed: called before the first operation on the values; it gives them back, or raises.
    """

    needed: Callable[[], None]

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func not in _ABOUT:
            for each in iterate_tensors((args, kwargs)):
                if isinstance(each, Valueless):
                    each.needed()
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def lose(parameter: nn.Parameter, needed: Callable[[], None]) -> None:
    """`needed` is called when the values are used, until `regain`."""
    if type(parameter) in (nn.Parameter, Valueless):  # not one of a dry run, which has no values anyway
        parameter.__class__ = Valueless
        parameter.needed = needed  # type: ignore[attr-defined]


def regain(parameter: nn.Parameter) -> None:
    """The values are there."""
    if type(parameter) is Valueless:
        parameter.__class__ = nn.Parameter  # type: ignore[assignment]
