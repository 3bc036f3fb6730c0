"""Logits split by vocabulary that look whole.

An unmodified `training_step` may treat the model's output as the plain tensor `[b, s, vocab]` it was: `F.cross_entropy` on it is
computed without gathering; shape, type and device answer as for the whole; reshapes and slices of the other dimensions, casts and
scaling stay split (`_split_operations.py`); anything else gathers the logits, differentiably, and goes on with a plain tensor.
A gather is a collective: all tensor-parallel ranks must ask the same of the logits, as they do when they run the same step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from hybrid_strategy.errors import ModelError, message
from hybrid_strategy.parallel.tensor import _split_operations
from hybrid_strategy.parallel.tensor.collectives import all_gather_uneven, gather_vocabulary
from hybrid_strategy.parallel.tensor.span import VocabSpan

_PROPERTIES = ("shape", "ndim", "dtype", "device", "layout", "itemsize", "nbytes", "requires_grad", "_base", "_version")
_KINDS = ("is_cpu", "is_cuda", "is_meta", "is_sparse", "is_quantized", "is_nested", "is_mkldnn", "is_sparse_csr")
_METHODS = ("size", "dim", "ndimension", "numel", "nelement", "stride", "is_contiguous", "element_size", "get_device", "__len__")
_QUESTIONS = ("numel", "is_floating_point", "is_complex", "is_inference")
_METADATA = frozenset(
    [
        *(getattr(Tensor, name).__get__ for name in (*_PROPERTIES, *_KINDS)),
        *(getattr(Tensor, name) for name in (*_METHODS, *_QUESTIONS)),
        *(getattr(torch, name) for name in _QUESTIONS),
    ]
)
"""What the shell answers by itself."""

_ASSIGNMENTS = ("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__")


class VocabParallelLogits(Tensor):
    """A shell without memory, of the shape of the whole logits, around this rank's columns.

    Two nets lie under the shell. `__torch_function__` sees every call of torch's public functions. What goes around it, such as a
    custom autograd function, meets `__torch_dispatch__` with the gathered values, and its gradient flows back through the shell.

    Attributes:
        local: this rank's columns: the shape of the whole but for `span.width` along `vocab_dim`.
        span: who holds which columns.
        vocab_dim: the dimension that is split, counted from the front.
        whole: the gathered logits from the moment they were changed in place.
    """

    local: Tensor
    span: VocabSpan
    vocab_dim: int
    whole: Tensor | None

    @staticmethod
    def wrap(local: Tensor, span: VocabSpan, vocab_dim: int = -1) -> Tensor:
        """Logits of which `local` is this rank's part; in a group of one rank simply `local`."""
        if len(span.widths) == 1:
            return local
        dim = vocab_dim % local.dim()
        logits: VocabParallelLogits = cast(Any, _Shell).apply(local, span, dim)
        logits.local, logits.span, logits.vocab_dim, logits.whole = local, span, dim, None
        return logits

    def like(self, local: Tensor, vocab_dim: int | None = None) -> Tensor:
        """Logits of the same vocabulary around another local part."""
        return VocabParallelLogits.wrap(local, self.span, self.vocab_dim if vocab_dim is None else vocab_dim)

    def full_tensor(self) -> Tensor:
        """The whole logits as a plain tensor, differentiable: every rank's gradient is cut to its own columns."""
        if self.whole is not None:
            return self.whole
        last = self.local.movedim(self.vocab_dim, -1)
        return gather_vocabulary(last, self.span.group, self.span.widths).movedim(-1, self.vocab_dim)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        """No collective: one rank alone may print it."""
        columns = f"{self.span.start}:{self.span.start + self.span.width}"
        return f"VocabParallelLogits(shape={tuple(self.shape)}, dtype={self.dtype}, columns {columns} on this rank)"

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        subject = args[0] if args else kwargs.get("input")
        if isinstance(subject, cls) and subject.whole is None:
            result = _split_operations.run(
                func, subject, args[1:], {key: each for key, each in kwargs.items() if each is not subject}
            )
            if result is not NotImplemented:
                return result
        return _on_whole(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:  # how autograd saves a tensor
            logits = args[0]
            return logits.like(logits.local.detach())
        if func._schema.is_mutable:
            raise _unsupported(str(func))
        return func(*tree_map_only(cls, _values, args), **tree_map_only(cls, _values, kwargs or {}))


class _Shell(torch.autograd.Function):
    """The edge by which a gradient that reached the shell reaches `local`."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, span: VocabSpan, dim: int) -> Tensor:
        ctx.dim, ctx.start, ctx.width = dim, span.start, span.width
        shape = [*local.shape[:dim], span.vocab_size, *local.shape[dim + 1 :]]
        return Tensor._make_wrapper_subclass(
            VocabParallelLogits, shape, dtype=local.dtype, layout=local.layout, device=local.device, requires_grad=False
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0].narrow(ctx.dim, ctx.start, ctx.width), None, None


def _values(logits: VocabParallelLogits) -> Tensor:
    """The whole logits where autograd has been passed already."""
    if logits.whole is not None:
        return logits.whole.detach()
    last = logits.local.detach().movedim(logits.vocab_dim, -1)
    return all_gather_uneven(last, logits.span.group, logits.span.widths).movedim(-1, logits.vocab_dim)


def _on_whole(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs `func` on the gathered logits; from a change in place on, the logits are what it made of them."""
    name = func.__name__
    if name in ("data_ptr", "untyped_storage", "__dlpack__", "__cuda_array_interface__"):
        raise _unsupported(name)
    whole_args, whole_kwargs = tree_map_only(VocabParallelLogits, VocabParallelLogits.full_tensor, (args, kwargs))
    result = func(*whole_args, **whole_kwargs)
    if _in_place(name) and isinstance(args[0], VocabParallelLogits):
        args[0].whole = whole_args[0]
        return args[0] if result is whole_args[0] else result
    return result


def _in_place(name: str) -> bool:
    return (name.endswith("_") and not name.endswith("__")) or name in _ASSIGNMENTS


def _unsupported(what: str) -> ModelError:
    rule = "logits split by vocabulary have no memory of their own"
    advice = "Call F.cross_entropy on them, or take `logits.full_tensor()` first: the whole as a plain tensor"
    return ModelError(message("logits", what, rule, "", advice))
