"""Cross entropy of logits that are split by vocabulary, without gathering them.

With `lse_r` the logarithm of the sum of exponentials over rank r's columns, the loss of a row is
`logsumexp_r(lse_r) - logit[target]`: the vocabulary-parallel cross entropy of Megatron-LM (arXiv:1909.08053 section 3) in a form
that needs one small all-gather, two numbers a row and rank. Every rank adds them up in the same order, so the loss is the same to
the last bit on every rank.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from hybrid_strategy.parallel.second_order import refuse_second_order
from hybrid_strategy.parallel.tensor.collectives import all_gather
from hybrid_strategy.parallel.tensor.span import VocabSpan


def vocab_parallel_cross_entropy(
    logits: Tensor, target: Tensor, span: VocabSpan, ignore_index: int = -100, reduction: str = "mean"
) -> Tensor:
    """As `F.cross_entropy` with class indices, on this rank's columns.

    Args:
        logits: `[rows, span.width]`, any float type; computed in float32 or better.
        target: `[rows]`, indices into the whole vocabulary.

    Returns:
        The loss, `[]` or (reduction `none`) `[rows]`: float32 under autocast, else of the logits' type, as torch has it.
    """
    kept = target != ignore_index
    losses: Tensor = cast(Any, _CrossEntropy).apply(logits, target, kept, span)
    if reduction != "none":
        losses = losses.sum()
    if reduction == "mean":
        losses = losses / kept.sum()
    return losses if torch.is_autocast_enabled(logits.device.type) else losses.to(logits.dtype)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


class _CrossEntropy(torch.autograd.Function):
    """Losses a row, 0 where not `kept`. Saves the logits, alive anyway, and one number a row instead of the probabilities."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, kept: Tensor, span: VocabSpan) -> Tensor:
        start, stop = span.start, span.start + span.width
        # a target that is no class at all stays wrong on every rank, so that torch refuses it as it does without the split
        elsewhere = ((target >= 0) & (target < start)) | ((target >= stop) & (target < span.vocab_size)) | ~kept
        column = (target - start).masked_fill(elsewhere, 0).unsqueeze(1)
        chosen = _wide(logits.gather(1, column).squeeze(1)).masked_fill(elsewhere, 0)
        stacked = torch.stack((torch.logsumexp(_wide(logits), dim=1), chosen))
        pairs = (
            torch.unflatten(all_gather(stacked, span.group, dim=0), 0, (-1, 2)) if len(span.widths) > 1 else stacked.unsqueeze(0)
        )
        lse = torch.logsumexp(pairs[:, 0], dim=0)
        ctx.save_for_backward(logits, lse, column, elsewhere, kept)
        return (lse - pairs[:, 1].sum(0)).masked_fill(~kept, 0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        refuse_second_order(
            "the loss of logits that are split by vocabulary can be differentiated once",
            "Take logits.full_tensor() before the loss, or set tensor_parallel_size=1",
        )
        logits, lse, column, elsewhere, kept = ctx.saved_tensors
        # zero for rows without a target, also where all are and the mean's factor is 1/0
        factor = grads[0].masked_fill(~kept, 0).unsqueeze(1)
        grad = (_wide(logits) - lse.unsqueeze(1)).exp_()
        grad.scatter_add_(1, column, elsewhere.unsqueeze(1).to(grad.dtype) - 1)
        return grad.mul_(factor).to(logits.dtype), None, None, None
