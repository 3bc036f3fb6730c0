"""The norm of all gradients of the whole model, the same number on every rank and in every layout."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor


def local_norm_power(gradients: Iterable[Tensor], norm_type: float, device: torch.device) -> Tensor:
    """Sum of |g|^p over the given gradients (largest |g| for p = inf): of a tensor in fp32 or its own fp64, of all in fp64."""
    kept = [gradient.detach() for gradient in gradients]
    if not kept:
        return torch.zeros((), dtype=torch.float64, device=device)
    wide = [gradient if gradient.dtype in (torch.float32, torch.float64) else gradient.float() for gradient in kept]
    # fp64 whatever the gradients are: a rank that owns none must still reduce a number of the same type as its peers
    norms = torch.stack([norm.to(device, torch.float64) for norm in torch._foreach_norm(wide, norm_type)])
    return norms.max() if math.isinf(norm_type) else norms.pow(norm_type).sum()


def total_norm(gradients: Iterable[Tensor], norm_type: float, device: torch.device) -> Tensor:
    """The norm over the whole model, fp64, from the gradients whose pieces this rank owns. One all-reduce of one number.

    Args:
        gradients: gradients of owned pieces only, so that replicas, tied copies and shards count once.
        norm_type: p of the p-norm; `inf` for the largest absolute value.
        device: where the number is made and reduced.
    """
    power = local_norm_power(gradients, norm_type, device)
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(power, op=dist.ReduceOp.MAX if math.isinf(norm_type) else dist.ReduceOp.SUM)
    return power if math.isinf(norm_type) else power.pow(1.0 / norm_type)


def clip_by_norm(gradients: Iterable[Tensor], norm: Tensor, max_norm: float) -> None:
    """Scales all of this rank's gradients so that the whole model's norm is at most `max_norm`.

    A norm that is not finite leaves the gradients as they are: scaling would turn every healthy gradient into NaN or 0.
    """
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    factor = torch.where(torch.isfinite(norm), factor, torch.ones_like(factor))
    grouped: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for gradient in gradients:
        grouped.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    for (device, dtype), same in grouped.items():
        torch._foreach_mul_(same, factor.to(device, dtype))
