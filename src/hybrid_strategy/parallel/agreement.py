"""What ranks agree on: the values that a module begins with, and whether one of them has failed in a step."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from hybrid_strategy.distributed.groups import Groups


def agree_on_values(module: nn.Module) -> None:
    """Gives every rank rank 0's values where ranks differ: a module built without a seed is a different one on each rank."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    tensors = [each.detach() for each in (*module.parameters(), *module.buffers()) if not each.is_meta and each.numel()]
    if not tensors:
        return
    sums = torch.stack([each.double().sum().cpu() for each in tensors] + [each.double().abs().sum().cpu() for each in tensors])
    gathered: list[list[float] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, sums.tolist())
    if all(each == gathered[0] or _both_nan(each, gathered[0]) for each in gathered):
        return
    backend_device = torch.device("cuda") if dist.get_backend() == "nccl" else torch.device("cpu")
    for tensor in tensors:
        values = tensor.to(backend_device).contiguous()
        dist.broadcast(values, src=0)
        tensor.copy_(values)


def _both_nan(left: list[float] | None, right: list[float] | None) -> bool:
    return repr(left) == repr(right)


def agreement(groups: Groups, device: torch.device) -> Callable[[bool], bool] | None:
    """Asks ranks that gather weights together whether one of them has failed; `None` where there are no others."""
    if groups.layout.sharding != "zero3" or groups.gradient is None:
        return None

    def agree(failed: bool) -> bool:
        number = torch.tensor(float(failed), device=device)
        dist.all_reduce(number, op=dist.ReduceOp.MAX, group=groups.gradient)
        return bool(number.item())

    return agree
