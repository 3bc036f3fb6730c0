"""Operations that work position by position, on a rank's part of the sequence; NotImplemented where they mix positions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hybrid_strategy.parallel.context._sequence_loss import LOSSES
from hybrid_strategy.parallel.shell import Shell, operation_name

if TYPE_CHECKING:
    from hybrid_strategy.parallel.context.sequence import SplitSequence


def run(func: Callable[..., Any], shell: SplitSequence, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of `func(shell, *args, **kwargs)` with the sequence left cut, or NotImplemented."""
    name = operation_name(func)
    if name in _BINARY and len(args) == 1 and not kwargs:
        return _binary(func, shell, args[0])
    if any(isinstance(each, Shell) for each in (*args, *kwargs.values())):
        return NotImplemented
    if name in _ENTRYWISE:
        plain = not any(isinstance(each, Tensor) for each in (*args, *kwargs.values()))
        return shell.like(func(shell.local, *args, **kwargs)) if plain else NotImplemented
    operation = _OPERATIONS.get(name)
    return NotImplemented if operation is None else operation(func, shell, *args, **kwargs)


def run_reversed(func: Callable[..., Any], first: Any, shell: SplitSequence) -> Any:
    """The result of `func(first, shell)`, where only the second is a shell."""
    if operation_name(func) not in _BINARY:
        return NotImplemented
    part = _matching(first, shell)
    return part if part is NotImplemented else shell.like(func(part, shell.local))


def _binary(func: Callable[..., Any], shell: SplitSequence, other: Any) -> Any:
    part = _matching(other, shell)
    return part if part is NotImplemented else shell.like(func(shell.local, part))


def _matching(other: Any, shell: SplitSequence) -> Any:
    """The part of `other` that meets the shell's part when the two are broadcast; NotImplemented where that is not clear."""
    if not isinstance(other, Tensor):
        return other
    dim = shell.cut_dim - shell.dim() + other.dim()
    if isinstance(other, Shell):
        return _matching_shell(other, shell)
    if other.dim() > shell.dim():
        return NotImplemented
    if dim < 0 or other.shape[dim] == 1 or shell.span.scattered:
        return NotImplemented if dim >= 0 and other.shape[dim] != 1 else other
    return shell.span.own_part(other, dim) if other.shape[dim] == shell.shape[shell.cut_dim] else NotImplemented


def _matching_shell(other: Any, shell: SplitSequence) -> Any:
    """The part of another shell that lies as this one does."""
    alike = type(other) is type(shell) and other.whole is None and (other.dim(), other.cut_dim) == (shell.dim(), shell.cut_dim)
    return other.local if alike and shell.span.same_as(other.span) else NotImplemented


def _along_others(func: Callable[..., Any], shell: SplitSequence, *args: Any, **kwargs: Any) -> Any:
    """A function along one dimension behind the cut one, such as a softmax over the vocabulary."""
    dim = kwargs.get("dim", args[0] if args else None)
    if isinstance(dim, Sequence) and len(dim) == 1:
        dim = dim[0]
    if not isinstance(dim, int) or isinstance(dim, bool) or dim % shell.dim() <= shell.cut_dim:
        return NotImplemented
    result = func(shell.local, *args, **kwargs)
    if isinstance(result, Tensor):
        return shell.like(result)
    return type(result)(shell.like(each) for each in result)  # values and indices


def _over_last(func: Callable[..., Any], shell: SplitSequence, *args: Any, **kwargs: Any) -> Any:
    """A function over the last dimensions, with parameters: a linear layer, a norm."""
    shape = args[0] if args else None
    count = 1 if isinstance(shape, Tensor | int) else len(shape or ())
    if func.__name__ == "linear":
        count = 1
    if not count or shell.cut_dim >= shell.dim() - count:
        return NotImplemented
    return shell.like(func(shell.local, *args, **kwargs))


def _to(func: Callable[..., Any], shell: SplitSequence, *args: Any, **kwargs: Any) -> Any:
    plain = not any(isinstance(each, Tensor) for each in (*args, *kwargs.values()))
    probe = torch.empty(0, dtype=shell.dtype, device=shell.device)
    if not plain or func(probe, *args, **kwargs).device != shell.device:  # the group's collectives run on this device
        return NotImplemented
    return shell.like(func(shell.local, *args, **kwargs))


def _matmul(func: Callable[..., Any], shell: SplitSequence, other: Any) -> Any:
    fits = isinstance(other, Tensor) and other.dim() == 2 and shell.cut_dim < shell.dim() - 1
    return shell.like(func(shell.local, other)) if fits else NotImplemented


def _reshape(_: Callable[..., Any], shell: SplitSequence, *shape: Any, **kwargs: Any) -> Any:
    sizes = list(shape[0]) if len(shape) == 1 and isinstance(shape[0], tuple | list) else list(shape)
    if kwargs or not sizes or not all(isinstance(each, int) for each in sizes) or shell.span.scattered:
        return NotImplemented
    return _reshaped(shell, _resolved(sizes, shell.numel()))


def _resolved(sizes: list[int], count: int) -> list[int]:
    known = prod(each for each in sizes if each != -1)
    return [count // known if each == -1 and known else each for each in sizes]


def _reshaped(shell: SplitSequence, sizes: list[int]) -> Any:
    """The shell in another shape, where positions stay apart: what is in front of the sequence may be flattened into it."""
    span = shell.span
    rows = prod(shell.shape[: shell.cut_dim]) * span.outer
    if prod(sizes) != shell.numel():
        return NotImplemented
    for dim, size in enumerate(sizes):
        outer, rest = divmod(size, span.length) if span.length else (0, 1)
        if outer and not rest and prod(sizes[:dim]) * outer == rows:
            local = shell.local.reshape(*sizes[:dim], outer * len(span.own), *sizes[dim + 1 :])
            return type(shell).wrap(local, span.flattened(outer), dim)
    return NotImplemented


def _flatten(_: Callable[..., Any], shell: SplitSequence, start_dim: int = 0, end_dim: int = -1) -> Any:
    start, end = start_dim % shell.dim(), end_dim % shell.dim()
    shape = list(shell.shape)
    if shell.span.scattered:
        return NotImplemented
    return _reshaped(shell, [*shape[:start], prod(shape[start : end + 1]), *shape[end + 1 :]])


def _unsqueeze(_: Callable[..., Any], shell: SplitSequence, dim: int) -> Any:
    place = dim % (shell.dim() + 1)
    return shell.like(shell.local.unsqueeze(place), shell.cut_dim + (place <= shell.cut_dim))


def _transpose(_: Callable[..., Any], shell: SplitSequence, dim0: int, dim1: int) -> Any:
    first, second = dim0 % shell.dim(), dim1 % shell.dim()
    moved = {first: second, second: first}.get(shell.cut_dim, shell.cut_dim)
    return shell.like(shell.local.transpose(first, second), moved)


def _permute(_: Callable[..., Any], shell: SplitSequence, *dims: Any) -> Any:
    order = [each % shell.dim() for each in (dims[0] if isinstance(dims[0], tuple | list) else dims)]
    return shell.like(shell.local.permute(order), order.index(shell.cut_dim))


def _pieces(func: Callable[..., Any], shell: SplitSequence, count: Any, dim: int = 0) -> Any:
    if dim % shell.dim() == shell.cut_dim:
        return NotImplemented
    return tuple(shell.like(piece) for piece in func(shell.local, count, dim))


def _getitem(_: Callable[..., Any], shell: SplitSequence, index: Any) -> Any:
    parts = list(index) if isinstance(index, tuple) else [index]
    if not all(each is None or each is Ellipsis or type(each) in (int, slice) for each in parts):
        return NotImplemented
    used = sum(each is not None and each is not Ellipsis for each in parts)
    place = next((i for i, each in enumerate(parts) if each is Ellipsis), len(parts))
    parts[place : place + 1] = [slice(None)] * (shell.dim() - used)
    where = _place_of(parts, shell.cut_dim)
    if not isinstance(parts[where], slice):
        return NotImplemented
    start, stop, step = parts[where].indices(shell.shape[shell.cut_dim])
    whole = (start, stop, step) == (0, shell.shape[shell.cut_dim], 1)
    if not whole and (step != 1 or shell.span.outer > 1 or shell.span.scattered or start >= stop):
        return NotImplemented
    span, parts[where] = (shell.span, slice(None)) if whole else shell.span.sliced(start, stop)
    dim = sum(not isinstance(each, int) for each in parts[:where])
    return type(shell).wrap(shell.local[tuple(parts)], span, dim)


def _place_of(parts: list[Any], dim: int) -> int:
    """Where the index of dimension `dim` stands among others and new axes."""
    real = [place for place, each in enumerate(parts) if each is not None]
    return real[dim]


def _gather(func: Callable[..., Any], shell: SplitSequence, dim: int, index: Tensor) -> Any:
    fits = index.dim() == shell.dim() and dim % shell.dim() != shell.cut_dim and not shell.span.scattered
    if not fits or index.shape[shell.cut_dim] != shell.shape[shell.cut_dim]:
        return NotImplemented
    return shell.like(func(shell.local, dim, shell.span.own_part(index, shell.cut_dim)))


def _register_hook(_: Callable[..., Any], shell: SplitSequence, hook: Callable[[Tensor], Any]) -> Any:
    kind, span, dim = type(shell), shell.span, shell.cut_dim  # held by the hook: the shell would be held for ever

    def on_local(grad: Tensor) -> Tensor | None:
        changed = hook(kind.wrap(grad, span, dim))
        if changed is None or type(changed) is kind:
            return None if changed is None else changed.local
        return span.own_part(changed, dim)

    return shell.local.register_hook(on_local)


_CASTS = ("float", "double", "half", "bfloat16", "contiguous", "clone", "detach")
_MATHS = ("neg", "__neg__", "abs", "exp", "log", "sqrt", "rsqrt", "square", "pow", "__pow__", "clamp", "isnan", "isfinite")
_CURVES = ("tanh", "sigmoid", "relu", "gelu", "silu", "softplus", "logical_not", "__invert__")
_ENTRYWISE = frozenset((*_CASTS, *_MATHS, *_CURVES))

_ARITHMETIC = ("add", "sub", "mul", "div", "multiply", "divide", "true_divide", "maximum", "minimum")
_OPERATORS = ("__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__", "__rtruediv__")
_COMPARISONS = (
    "eq",
    "ne",
    "lt",
    "le",
    "gt",
    "ge",
    "__eq__",
    "__ne__",
    "__lt__",
    "__le__",
    "__gt__",
    "__ge__",
    "__and__",
    "__or__",
)
_BINARY = frozenset((*_ARITHMETIC, *_OPERATORS, *_COMPARISONS))

_REDUCTIONS = ("softmax", "log_softmax", "logsumexp", "argmax", "amax", "max", "mean", "sum")

_OPERATIONS: dict[str, Callable[..., Any]] = {
    **LOSSES,
    **dict.fromkeys(_REDUCTIONS, _along_others),
    **dict.fromkeys(("linear", "layer_norm", "rms_norm"), _over_last),
    **dict.fromkeys(("matmul", "__matmul__"), _matmul),
    **dict.fromkeys(("split", "chunk"), _pieces),
    "to": _to,
    "view": _reshape,
    "reshape": _reshape,
    "flatten": _flatten,
    "unsqueeze": _unsqueeze,
    "transpose": _transpose,
    "permute": _permute,
    "__getitem__": _getitem,
    "gather": _gather,
    "register_hook": _register_hook,
    "retain_grad": lambda _, shell: shell.local.retain_grad(),
    "get_grad": lambda _, shell: None if shell.local.grad is None else shell.like(shell.local.grad),
    "get_grad_fn": lambda _, shell: shell.local.grad_fn,
    "get_is_leaf": lambda _, shell: shell.local.is_leaf,
}
