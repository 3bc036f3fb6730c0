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

from hybrid_strategy.parallel.shell import Shell
from hybrid_strategy.parallel.tensor import _split_operations
from hybrid_strategy.parallel.tensor.collectives import all_gather_uneven, gather_vocabulary
from hybrid_strategy.parallel.tensor.span import VocabSpan


class VocabParallelLogits(Shell):
    """A shell of the shape of the whole logits around this rank's columns.

    Attributes:
        local: this rank's columns: the shape of the whole but for `span.width` along `vocab_dim`.
        span: who holds which columns.
        vocab_dim: the dimension that is split, counted from the front.
    """

    subject = "logits"
    rule = "logits split by vocabulary have no memory of their own"
    span: VocabSpan
    vocab_dim: int

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

    def gathered_values(self) -> Tensor:
        last = self.local.detach().movedim(self.vocab_dim, -1)
        return all_gather_uneven(last, self.span.group, self.span.widths).movedim(-1, self.vocab_dim)

    def around_detached(self) -> Tensor:
        return self.like(self.local.detach())

    def on_part(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return _split_operations.run(func, self, args, kwargs)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        """No collective: one rank alone may print it."""
        columns = f"{self.span.start}:{self.span.start + self.span.width}"
        return f"VocabParallelLogits(shape={tuple(self.shape)}, dtype={self.dtype}, columns {columns} on this rank)"


class _Shell(torch.autograd.Function):
    """The edge by which a gradient that reached the shell reaches `local`."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, span: VocabSpan, dim: int) -> Tensor:
        ctx.dim, ctx.start, ctx.width = dim, span.start, span.width
        return VocabParallelLogits.around(local, [*local.shape[:dim], span.vocab_size, *local.shape[dim + 1 :]])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0].narrow(ctx.dim, ctx.start, ctx.width), None, None
