"""Lightning's precision plug-ins, taught about a model that is spread over ranks: global clipping, one scaler decision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

from hybrid_strategy.distributed.gradient_norm import clip_by_norm, total_norm
from hybrid_strategy.strategy import _lightning

OwnedGradients = Callable[[Optimizer], list[Tensor]]


def adapt_precision(trainer: pl.Trainer, owned_gradients: OwnedGradients, device: torch.device) -> None:
    """Makes the trainer's precision plug-in clip by the whole model's norm, agree on overflows, and tell of skipped steps.

    Args:
        trainer: its plug-in is adapted.
        owned_gradients: gradients of the pieces of an optimizer that this rank counts.
        device: the rank's device.
    """
    plugin: Any = trainer.precision_plugin

    def clip(optimizer: Optimizer, clip_val: float) -> None:
        norm = total_norm(owned_gradients(optimizer), 2.0, device)
        gradients = [p.grad for p in plugin.main_params(optimizer) if p.grad is not None and p.grad.numel()]
        clip_by_norm(gradients, norm, float(clip_val))

    plugin.clip_grad_by_norm = clip
    scaler = scaler_of(plugin)
    if scaler is not None:
        if dist.is_initialized():
            _agree_on_overflows(scaler, device)
        plugin.optimizer_step = SkippedSteps(trainer, plugin).optimizer_step


def scaler_of(plugin: Precision) -> GradScaler | None:
    """The loss scaler of a precision plug-in, if it has one that is in use."""
    scaler = plugin.scaler if isinstance(plugin, MixedPrecision) else None
    return scaler if scaler is not None and scaler.is_enabled() else None


def loss_scale(plugin: Precision) -> float:
    """The factor that the precision plug-in puts on the loss before backward; 1 without a scaler."""
    scaler = scaler_of(plugin)
    return float(scaler.get_scale()) if scaler is not None else 1.0


def _agree_on_overflows(scaler: GradScaler, device: torch.device) -> None:
    """Lets the user's own scaler find an overflow on all ranks where one has it, also for optimizers that unscale themselves."""

    def unscale(*arguments: Any) -> dict[torch.device, Tensor]:
        found: dict[torch.device, Tensor] = type(scaler)._unscale_grads_(scaler, *arguments)
        flag = found.setdefault(device, torch.zeros((), device=device))  # a rank may hold nothing of an optimizer
        flag.copy_(torch.stack([each.to(device) for each in found.values()]).max())
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return {each: flag.to(each) for each in found}

    vars(scaler)["_unscale_grads_"] = unscale


class SkippedSteps:
    """Counts the optimizer steps that a loss scaler left out, and holds back the schedules of the learning rate meanwhile.

    A schedule counts real steps: it would be ahead of the optimizer otherwise, through its warm-up before the first update.

    Args:
        trainer: whose steps they are.
        plugin: its precision plug-in.
    """

    def __init__(self, trainer: pl.Trainer, plugin: Precision) -> None:
        self._trainer, self._plugin = trainer, plugin
        self.count, self._last_was_skipped = 0, False
        _lightning.hold_step_schedules(trainer, lambda: self._last_was_skipped)

    def optimizer_step(self, *arguments: Any, **options: Any) -> Any:
        """Stands for the plug-in's."""
        before = loss_scale(self._plugin)
        result = type(self._plugin).optimizer_step(self._plugin, *arguments, **options)
        self._after_step(before)
        return result

    def _after_step(self, scale_before: float) -> None:
        scale = loss_scale(self._plugin)
        self._last_was_skipped = scale < scale_before
        if not self._last_was_skipped:
            return
        self.count += 1
        step = self._trainer.global_step
        _lightning.rank_zero_warn(
            f"step {step} is skipped on all ranks: a gradient is not finite at the loss scale {scale_before:g}; the scale is "
            f"{scale:g} from now on, the learning rate stays. Skipped so far: {self.count}."
        )
        for logger in self._trainer.loggers:
            logger.log_metrics({"skipped_steps": float(self.count)}, step=step)
