"""Collectives of tensor parallelism as autograd functions on plain tensors. The only file that calls them.

Each pair below is one operator and its transpose, as in Megatron-LM (arXiv:1909.08053 section 3, arXiv:2205.05198 section 4.2):

    copy_to_region        identity                  backward: all-reduce
    reduce_from_region    all-reduce                backward: identity
    gather_from_sequence  all-gather                backward: reduce-scatter
    scatter_to_sequence   reduce-scatter            backward: all-gather
    gather_vocabulary     all-gather (last dim)     backward: slice

torch's functional collectives are used because their results are ordinary operator outputs: selective activation
checkpointing can keep them, `torch.compile` traces them and `CommDebugMode` counts them. In a group of one rank nothing happens.

The transposes are differentiable in their turn, for a penalty on gradients: that of a transpose is the operator itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from hybrid_strategy.errors import LayoutError, message
from hybrid_strategy.parallel.second_order import makes_graph

SEQUENCE_DIM = 1
"""Activations are `[batch, sequence, hidden]`."""

_ops = torch.ops._c10d_functional


def all_reduce(x: Tensor, group: ProcessGroup) -> Tensor:
    """The sum of `x` over the group, in a new tensor. Not differentiable."""
    return _wait(_ops.all_reduce(x.contiguous(), "sum", group.group_name))


def all_gather(x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    """The ranks' `x`, of equal shapes, one after another along `dim`. Not differentiable."""
    size = group.size()
    gathered = _wait(_ops.all_gather_into_tensor(x.contiguous(), size, group.group_name))
    if dim == 0:
        return gathered
    return gathered.view(size, *x.shape).movedim(0, dim).flatten(dim, dim + 1)


def reduce_scatter(x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    """This rank's block along `dim` of the sum of `x` over the group. Not differentiable."""
    size = group.size()
    if dim != 0:
        x = torch.unflatten(x, dim, (size, -1)).movedim(dim, 0).flatten(0, 1)
    return _wait(_ops.reduce_scatter_tensor(x.contiguous(), "sum", size, group.group_name))


def all_gather_uneven(x: Tensor, group: ProcessGroup, widths: tuple[int, ...]) -> Tensor:
    """The ranks' `x` side by side along the last dimension; rank `r` brings `widths[r]` columns. Not differentiable."""
    widest = max(widths)
    if x.shape[-1] < widest:
        x = torch.nn.functional.pad(x, (0, widest - x.shape[-1]))
    gathered = _wait(_ops.all_gather_into_tensor(x.contiguous(), len(widths), group.group_name))
    pieces = gathered.view(len(widths), *x.shape).unbind(0)
    return torch.cat([piece[..., :width] for piece, width in zip(pieces, widths, strict=True)], dim=-1)


def copy_to_region(x: Tensor, group: ProcessGroup) -> Tensor:
    """A replicated `x` enters a region where ranks compute different parts: their gradients are summed."""
    return x if group.size() == 1 else _apply(_Copy, x, group)


def reduce_from_region(x: Tensor, group: ProcessGroup) -> Tensor:
    """Partial sums leave the region as one replicated sum."""
    return x if group.size() == 1 else _apply(_Reduce, x, group)


def gather_from_sequence(x: Tensor, group: ProcessGroup, dim: int = SEQUENCE_DIM) -> Tensor:
    """Sequence shards enter the region whole: `[b, s/n, h]` -> `[b, s, h]`."""
    return x if group.size() == 1 else _apply(_Gather, x, group, dim)


def scatter_to_sequence(x: Tensor, group: ProcessGroup, dim: int = SEQUENCE_DIM) -> Tensor:
    """Partial sums leave the region as shards of the sum: `[b, s, h]` -> `[b, s/n, h]`."""
    check_divides(x, group, dim)
    return x if group.size() == 1 else _apply(_Scatter, x, group, dim)


def gather_vocabulary(x: Tensor, group: ProcessGroup, widths: tuple[int, ...]) -> Tensor:
    """Logits whole on every rank: `[..., widths[rank]]` -> `[..., sum(widths)]`. What follows must be the same on every rank."""
    return x if group.size() == 1 else _apply(_GatherVocabulary, x, group, widths)


def _wait(x: Tensor) -> Tensor:
    waited: Tensor = _ops.wait_tensor(x)
    return waited


def _apply(function: Any, *arguments: Any) -> Tensor:
    result: Tensor = function.apply(*arguments)
    return result


def check_divides(x: Tensor, group: ProcessGroup, dim: int) -> None:
    """Raises LayoutError where dimension `dim` of `x` cannot be split evenly over the group."""
    if x.shape[dim] % group.size():
        rule = "it must divide the sequence length of every micro-batch under sequence_parallel"
        numbers = f"{group.size()} does not divide {x.shape[dim]}"
        raise LayoutError(
            message("tensor_parallel_size", group.size(), rule, numbers, "Pad the sequences or set sequence_parallel=False")
        )


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        reduced = reduce_from_region if makes_graph() else all_reduce
        return reduced(grads[0], ctx.group), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return copy_to_region(grads[0], ctx.group) if makes_graph() else grads[0], None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return all_gather(x, group, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        scattered = scatter_to_sequence if makes_graph() else reduce_scatter
        return scattered(grads[0], ctx.group, ctx.dim), None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return reduce_scatter(x, group, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        gathered = gather_from_sequence if makes_graph() else all_gather
        return gathered(grads[0], ctx.group, ctx.dim), None, None


class _GatherVocabulary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, widths: tuple[int, ...]) -> Tensor:
        rank = group.rank()
        ctx.columns = slice(sum(widths[:rank]), sum(widths[: rank + 1]))
        ctx.group = group
        return all_gather_uneven(x, group, widths)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        whole = copy_to_region(grads[0], ctx.group) if makes_graph() else grads[0]
        return whole[..., ctx.columns], None, None
