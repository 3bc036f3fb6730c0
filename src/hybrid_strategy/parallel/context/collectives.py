"""Collectives of context parallelism as autograd functions.

The loss is the same on every rank of a group. Each rank differentiates 1/n of it, so that the sum over the ranks of what they
find is the gradient, wherever a parameter is used: on parts of a sequence, where the ranks find different parts of it, or on the
whole, where each finds 1/n of it. So a value that goes from parts to the whole sums the ranks' gradients on its way back.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from hybrid_strategy.errors import ModelError, message
from hybrid_strategy.parallel.context.region import ContextRegion
from hybrid_strategy.parallel.context.span import SequenceSpan
from hybrid_strategy.parallel.second_order import makes_graph
from hybrid_strategy.parallel.tensor import collectives


def gather_sequence(part: Tensor, span: SequenceSpan, dim: int) -> Tensor:
    """The whole along `dim` from the ranks' parts; backward: the ranks' gradients summed, this rank's part of them."""
    first = _base_first(part, span, dim)
    whole: Tensor = cast(Any, _Gather).apply(first, span)
    return _base_back(whole, span, dim)


def scatter_sequence(whole: Tensor, span: SequenceSpan, dim: int) -> Tensor:
    """This rank's part along `dim` of the sum of `whole` over the ranks. Not differentiable."""
    return _base_back(_scatter(_base_first(whole, span, dim), span), span, dim)


def sum_over_ranks(x: Tensor, region: ContextRegion) -> Tensor:
    """The sum of `x` over the ranks, in the same order on each, so that it is the same to the last bit."""
    total: Tensor = cast(Any, _Sum).apply(x, region)
    return total


def _base_first(x: Tensor, span: SequenceSpan, dim: int) -> Tensor:
    """Moves the sequence to dimension 0, what was flattened in front of it to dimension 1."""
    first = x.movedim(dim, 0)
    return first if span.outer == 1 else first.unflatten(0, (span.outer, -1)).movedim(1, 0)


def _base_back(x: Tensor, span: SequenceSpan, dim: int) -> Tensor:
    return (x if span.outer == 1 else x.movedim(1, 0).flatten(0, 1)).movedim(0, dim)


def _gather(part: Tensor, span: SequenceSpan) -> Tensor:
    missing = span.longest - part.shape[0]
    if missing:
        part = torch.cat((part, part.new_zeros(missing, *part.shape[1:])))
    gathered = collectives.all_gather(part, span.region.group, dim=0)
    return gathered.index_select(0, span.slots(part.device))


def _scatter(whole: Tensor, span: SequenceSpan) -> Tensor:
    buffer = whole.new_zeros(span.region.size * span.longest, *whole.shape[1:])
    buffer.index_copy_(0, span.slots(whole.device), whole)
    return collectives.reduce_scatter(buffer, span.region.group, dim=0)[: len(span.own)]


def _refuse_in_step(region: ContextRegion) -> None:
    """A step that takes gradients itself does not take those of 1/n of the loss.

    Raises:
        ModelError: it does.
    """
    if region.in_forward() or makes_graph():
        rule = "a step that takes gradients itself would get them of its part of the sequences, and counted once a rank"
        raise ModelError(message("context_parallel_size", region.size, rule, "", "Set context_parallel_size=1"))


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, span: SequenceSpan) -> Tensor:
        ctx.span = span
        return _gather(part, span)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        _refuse_in_step(ctx.span.region)
        return _scatter(grads[0], ctx.span), None


class _Sum(torch.autograd.Function):
    """Each rank's gradient is that of 1/n of the loss, and all are the same: their sum is n times one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, region: ContextRegion) -> Tensor:
        ctx.region = region
        return collectives.all_gather(x.reshape(1, *x.shape), region.group, dim=0).sum(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        _refuse_in_step(ctx.region)
        return grads[0] * ctx.region.size, None
