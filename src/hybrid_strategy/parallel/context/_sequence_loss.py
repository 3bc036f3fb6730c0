"""Losses over class indices on a rank's part of the sequence: one number a rank is exchanged, whatever the vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hybrid_strategy.parallel.context.collectives import sum_over_ranks

if TYPE_CHECKING:
    from hybrid_strategy.parallel.context.sequence import SplitSequence


def _class_loss(
    func: Callable[..., Tensor],
    shell: SplitSequence,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    **options: Any,
) -> Any:
    """`F.cross_entropy` or `F.nll_loss`; every rank knows all targets, so also how many of them count."""
    class_dim = min(1, shell.dim() - 1)
    shape = [size for dim, size in enumerate(shell.shape) if dim != class_dim]
    plain = weight is None and size_average is None and reduce is None and not target.is_floating_point()
    known = reduction in ("mean", "sum", "none") and shell.cut_dim != class_dim and not shell.span.scattered
    if not plain or not known or list(target.shape) != shape:
        return NotImplemented
    dim = shell.cut_dim - (shell.cut_dim > class_dim)
    own = shell.span.own_part(target, dim)
    losses = func(shell.local, own, ignore_index=ignore_index, reduction="none", **options)
    if reduction == "none":
        return type(shell).wrap(losses, shell.span, dim)
    wide = losses if losses.dtype == torch.float64 else losses.float()
    total = sum_over_ranks(wide.sum(), shell.span.region)
    if reduction == "mean":
        total = total / (target != ignore_index).sum()
    return total.to(losses.dtype)


LOSSES: dict[str, Callable[..., Any]] = {"cross_entropy": _class_loss, "nll_loss": _class_loss}
