"""Operations that vocabulary-split logits survive without being gathered. Each answers NotImplemented where it mixes columns."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from hybrid_strategy.parallel.shell import operation_name
from hybrid_strategy.parallel.tensor.cross_entropy import vocab_parallel_cross_entropy

if TYPE_CHECKING:
    from hybrid_strategy.parallel.tensor.logits import VocabParallelLogits


def run(func: Callable[..., Any], logits: VocabParallelLogits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of `func(logits, *args, **kwargs)` with the logits split, or NotImplemented."""
    operation = _OPERATIONS.get(operation_name(func))
    if operation is None or any(type(each) is type(logits) for each in (*args, *kwargs.values())):
        return NotImplemented
    return operation(logits, *args, **kwargs)


def _is_last(logits: VocabParallelLogits) -> bool:
    return logits.vocab_dim == logits.dim() - 1


def _cross_entropy(
    logits: VocabParallelLogits,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    class_dim = min(1, logits.dim() - 1)
    plain = weight is None and size_average is None and reduce is None and label_smoothing == 0.0
    local = logits.local.movedim(logits.vocab_dim, -1)
    fits = target.shape == local.shape[:-1] and not target.is_floating_point() and reduction in ("mean", "sum", "none")
    if not plain or not fits or logits.vocab_dim != class_dim:
        return NotImplemented
    rows = local.reshape(-1, local.shape[-1])
    loss = vocab_parallel_cross_entropy(rows, target.reshape(-1), logits.span, ignore_index, reduction)
    return loss.view(target.shape) if reduction == "none" else loss


def _reshape(logits: VocabParallelLogits, *shape: Any, **kwargs: Any) -> Any:
    sizes = shape[0] if len(shape) == 1 and isinstance(shape[0], tuple | list) else shape
    if kwargs or not sizes or not _is_last(logits) or not all(isinstance(each, int) for each in sizes):
        return NotImplemented
    whole = _resolve(tuple(sizes), logits.numel())
    if whole is None or whole[-1] != logits.span.vocab_size:
        return NotImplemented
    return logits.like(logits.local.reshape(*whole[:-1], logits.span.width), -1)


def _resolve(sizes: tuple[int, ...], count: int) -> tuple[int, ...] | None:
    """`sizes` with a -1 replaced by what it stands for; None where they do not fit."""
    known = 1
    for each in sizes:
        known *= each if each != -1 else 1
    if -1 in sizes and known > 0:
        sizes = tuple(count // known if each == -1 else each for each in sizes)
    total = 1
    for each in sizes:
        total *= each
    return sizes if total == count and min(sizes) >= 0 else None


def _flatten(logits: VocabParallelLogits, start_dim: int = 0, end_dim: int = -1) -> Any:
    if not _is_last(logits) or end_dim % logits.dim() == logits.vocab_dim:
        return NotImplemented
    return logits.like(logits.local.flatten(start_dim, end_dim), -1)


def _unsqueeze(logits: VocabParallelLogits, dim: int) -> Any:
    if not _is_last(logits) or dim % (logits.dim() + 1) > logits.vocab_dim:
        return NotImplemented
    return logits.like(logits.local.unsqueeze(dim), -1)


def _getitem(logits: VocabParallelLogits, index: Any) -> Any:
    parts = list(index) if isinstance(index, tuple) else [index]
    if not _is_last(logits) or not _keeps_last(parts, logits.dim()):
        return NotImplemented
    return logits.like(logits.local[index], -1)


def _keeps_last(parts: list[Any], ndim: int) -> bool:
    """Does an index leave the last dimension whole and last?"""
    used = 0
    for each in parts:
        if isinstance(each, Tensor) and each.dtype == torch.bool:
            used += each.dim()
        elif each is not None and each is not Ellipsis:
            if not isinstance(each, int | slice | Tensor) or isinstance(each, bool):
                return False
            used += 1
    reaches_end = used >= ndim or any(each is Ellipsis for each in parts)
    last = parts[-1]
    return not reaches_end or last is Ellipsis or (isinstance(last, slice) and last == slice(None))


def _split(logits: VocabParallelLogits, split_size: Any, dim: int = 0) -> Any:
    if dim % logits.dim() == logits.vocab_dim:
        return NotImplemented
    return tuple(logits.like(piece) for piece in torch.split(logits.local, split_size, dim))


def _chunk(logits: VocabParallelLogits, chunks: int, dim: int = 0) -> Any:
    if dim % logits.dim() == logits.vocab_dim:
        return NotImplemented
    return tuple(logits.like(piece) for piece in logits.local.chunk(chunks, dim))


def _transpose(logits: VocabParallelLogits, dim0: int, dim1: int) -> Any:
    first, second = dim0 % logits.dim(), dim1 % logits.dim()
    moved = {first: second, second: first}.get(logits.vocab_dim, logits.vocab_dim)
    return logits.like(logits.local.transpose(first, second), moved)


def _permute(logits: VocabParallelLogits, *dims: Any) -> Any:
    order = [each % logits.dim() for each in (dims[0] if isinstance(dims[0], tuple | list) else dims)]
    return logits.like(logits.local.permute(order), order.index(logits.vocab_dim))


def _to(logits: VocabParallelLogits, *args: Any, **kwargs: Any) -> Any:
    probe = torch.empty(0, dtype=logits.dtype, device=logits.device).to(*args, **kwargs)
    if probe.device != logits.device:  # the group's collectives run on this device
        return NotImplemented
    return logits.like(logits.local.to(*args, **kwargs))


def _on_local(name: str) -> Callable[..., Any]:
    """Works on each entry by itself and takes nothing but numbers besides."""

    def operation(logits: VocabParallelLogits, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(each, Tensor) for each in (*args, *kwargs.values())):
            return NotImplemented
        return logits.like(getattr(logits.local, name)(*args, **kwargs))

    return operation


def _register_hook(logits: VocabParallelLogits, hook: Callable[[Tensor], Any]) -> Any:
    kind, span, dim = type(logits), logits.span, logits.vocab_dim  # held by the hook: the logits would be held for ever

    def on_local(grad: Tensor) -> Tensor | None:
        changed = hook(kind.wrap(grad, span, dim))
        if changed is None or type(changed) is kind:
            return None if changed is None else changed.local
        return changed.narrow(dim, span.start, span.width)  # type: ignore[no-any-return]

    return cast(Any, logits.local).register_hook(on_local)


def _grad(logits: VocabParallelLogits) -> Any:
    return None if logits.local.grad is None else logits.like(logits.local.grad)


_ENTRYWISE = ("float", "double", "half", "bfloat16", "contiguous", "clone", "detach", "tanh", "neg", "__neg__")
_SCALING = ("mul", "div", "multiply", "divide", "true_divide", "__mul__", "__rmul__", "__truediv__")

_OPERATIONS: dict[str, Callable[..., Any]] = {
    **{name: _on_local(name) for name in (*_ENTRYWISE, *_SCALING)},
    "cross_entropy": _cross_entropy,
    "view": _reshape,
    "reshape": _reshape,
    "flatten": _flatten,
    "unsqueeze": _unsqueeze,
    "__getitem__": _getitem,
    "split": _split,
    "chunk": _chunk,
    "transpose": _transpose,
    "permute": _permute,
    "to": _to,
    "register_hook": _register_hook,
    "retain_grad": lambda logits: logits.local.retain_grad(),
    "get_grad": _grad,
    "get_grad_fn": lambda logits: logits.local.grad_fn,
    "get_is_leaf": lambda logits: logits.local.is_leaf,
}
