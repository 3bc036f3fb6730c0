"""Lightning's precision plug-ins, taught about a model that is spread over ranks: global clipping, one scaler decision."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from torch import Tensor
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.optim import Optimizer

from hybrid_strategy.distributed.gradient_norm import clip_by_norm, total_norm

OwnedGradients = Callable[[Optimizer], list[Tensor]]


def adapt_precision(plugin: Precision, owned_gradients: OwnedGradients, device: torch.device) -> None:
    """Makes `plugin` clip by the whole model's norm and agree on overflows.

    Args:
        plugin: the trainer's precision plug-in.
        owned_gradients: gradients of the pieces of an optimizer that this rank counts.
        device: the rank's device.
    """

    def clip(optimizer: Optimizer, clip_val: float) -> None:
        norm = total_norm(owned_gradients(optimizer), 2.0, device)
        gradients = [p.grad for p in plugin.main_params(optimizer) if p.grad is not None and p.grad.numel()]
        clip_by_norm(gradients, norm, float(clip_val))

    plugin.clip_grad_by_norm = clip  # type: ignore[method-assign]
    if isinstance(plugin, MixedPrecision) and plugin.scaler is not None and dist.is_initialized():
        plugin.scaler = ShardedGradScaler(device=device.type, process_group=dist.group.WORLD)


def loss_scale(plugin: Precision) -> float:
    """The factor that the precision plug-in puts on the loss before backward; 1 without a scaler."""
    scaler = plugin.scaler if isinstance(plugin, MixedPrecision) else None
    return float(scaler.get_scale()) if scaler is not None else 1.0
