"""Tensors that know what they are made of: what is computed of one knows it, too."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import _StopRecomputationError

from hybrid_strategy.parallel.trees import map_tensors

_PLAIN = (Tensor, nn.Parameter)

PASSES_THROUGH = (torch.OutOfMemoryError, _StopRecomputationError)
"""Say nothing of what a function is given: the second ends a recomputation of activations that has all that it was to find."""


class MarkedTensor(Tensor):
    """Hands every function of torch that is given one to `computed`; other subclasses of tensors go first."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not all(each is cls or each in _PLAIN for each in types):
            return NotImplemented
        return cls.computed(func, args, kwargs or {})

    @classmethod
    def computed(cls, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The result of a function, with its marks."""
        raise NotImplementedError


def call_plainly(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The result without marks."""
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def fails_on_shapes(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], error: Exception) -> bool:
    """Does the function fail in the same way on tensors of these shapes that have no values? Then it fails for any values."""
    bare = map_tensors(lambda _, each: without_values(each), (args, dict(kwargs)))
    try:
        with torch.no_grad():
            call_plainly(func, *bare)
    except Exception as bare_error:  # of another type, or of missing memory: what cannot be tried without values
        return type(bare_error) is type(error) and "meta" not in str(bare_error).lower()
    return False


def without_values(tensor: Tensor) -> Tensor:
    """A tensor of this shape, type and order of entries, without memory."""
    with torch._C.DisableTorchFunctionSubclass():  # what looks at a marked tensor would come back here
        if tensor.layout is not torch.strided:
            return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        return torch.empty_strided(tuple(tensor.shape), tensor.stride(), dtype=tensor.dtype, device="meta")


def makes_of_values(name: str, result: Any) -> bool:
    """Is the result of the function of this name made of what it is given, and not only of its shape or type?"""
    return isinstance(result, Tensor | tuple | list) and not name.endswith("_like") and not name.startswith("new_")
