"""Manual optimization: right where each rank holds whole layers during the step, refused where a schedule must own it.

The module's `training_step` runs as it is, once a batch. Each `manual_backward` sums its gradients over the data-parallel ranks
at once and adds them to those of earlier calls, as one process does; each optimizer step makes the layers whole again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from hybrid_strategy.errors import LayoutError, ModelError, message
from hybrid_strategy.parallel.valueless import lose
from hybrid_strategy.parallelize import Parallelized
from hybrid_strategy.spec.layout import Layout
from hybrid_strategy.strategy.options import Options
from hybrid_strategy.strategy.step import StepEngine
from hybrid_strategy.strategy.step_call import StepCall


def check_manual_optimization(module: pl.LightningModule, layout: Layout, options: Options) -> None:
    """Refuses `automatic_optimization=False` under settings that need to own the step.

    Raises:
        LayoutError: a pipeline, or micro-batches.
    """
    if module.automatic_optimization:
        return
    rule = "under manual optimization the module calls backward itself, so a schedule cannot play the step"
    advice = "Set automatic_optimization=True, or pipeline_parallel_size=1 and one micro-batch"
    if layout.pipeline_parallel_size > 1:
        raise LayoutError(message("pipeline_parallel_size", layout.pipeline_parallel_size, rule, "", advice))
    for key in ("num_microbatches", "micro_batch_size"):
        value = getattr(options, key)
        if value is not None and not (key == "num_microbatches" and value == 1):
            raise LayoutError(message(key, value, rule, "", advice))


def _out_of_reach(parameter: nn.Parameter) -> Tensor:
    """Stands for the gradient of a whole parameter, where there is one of this rank's rows only."""
    gradient = nn.Parameter(torch.full((), torch.nan, dtype=parameter.dtype, device=parameter.device).expand(parameter.shape))
    lose(gradient, _refuse_gradients)
    return gradient


def _refuse_gradients() -> None:
    rule = "while a step with manual optimization runs under ZeRO, gradients lie with the rows that the optimizers hold"
    advice = "Use self.clip_gradients, change them in on_before_optimizer_step, or set sharding='ddp'"
    raise ModelError(message("training_step", "the gradient of a weight", rule, "It was used within the step", advice))


class ManualStep:
    """Runs the steps of a module that steps its optimizers itself.

    Args:
        engine: records what the step logs.
        made: the parallelised module.
    """

    def __init__(self, engine: StepEngine, made: Parallelized) -> None:
        self._engine, self._made, self._sharding = engine, made, made.sharding
        self._running = False
        self._share = 1.0

    def run(self, call: StepCall, module: pl.LightningModule) -> Any:
        """One call of `training_step`."""
        self._running, self._share = True, self._engine.share_of(call)
        vars(module)["toggle_optimizer"] = self._then_follow(module, "toggle_optimizer")
        vars(module)["untoggle_optimizer"] = self._then_follow(module, "untoggle_optimizer")
        self._engine.enter(call.kind)
        self._show_whole()
        try:
            return self._engine.run_whole(call)
        finally:
            self._running = False
            self._show_gradients(False)
            self._sharding.end()
            del vars(module)["toggle_optimizer"], vars(module)["untoggle_optimizer"]

    def backward(self, loss: Tensor, run: Callable[[], Tensor]) -> Tensor:
        """One `manual_backward`: its gradients are those of all data-parallel ranks, added to what was there."""
        sharding, slots = self._sharding, self._made.slots
        self._show_gradients(False)
        before = self._take_gradients()
        sharding.begin()
        # a gradient may be summed over the ranks before it is handed over, so each rank's share must be in it from the start
        weighing = loss.register_hook(lambda gradient: gradient * self._share) if loss.requires_grad else None
        with self._made.context.layers.used():
            result = run()
        if weighing is not None:
            weighing.remove()
        sharding.after_backward(slots)
        sharding.take()
        sharding.hand_over(1.0)
        sharding.reduce()
        for slot, old in zip(slots, before, strict=True):
            parameter = sharding.optimizer_parameter(slot)
            if old is not None:
                parameter.grad = old if parameter.grad is None else parameter.grad + old
        self._show_gradients(True)
        return result

    def stepped(self) -> None:
        """An optimizer has stepped: what follows in this call computes with the new values."""
        self._sharding.mark_changed()
        if self._running:
            self._show_whole()

    def _show_whole(self) -> None:
        """Makes the layers whole, and leaves the gradients that the optimizers hold where they are."""
        before = self._take_gradients()
        self._sharding.end()
        self._sharding.begin()
        self._put_gradients(before)

    def _show_gradients(self, there: bool) -> None:
        """Whole parameters, of which the optimizers hold rows, show that there are gradients, not what they are."""
        for slot in self._made.slots:
            if self._sharding.optimizer_parameter(slot) is not slot.parameter:
                slot.parameter.grad = _out_of_reach(slot.parameter) if there and slot.parameter.requires_grad else None

    def _take_gradients(self) -> list[Tensor | None]:
        held = [self._sharding.optimizer_parameter(slot) for slot in self._made.slots]
        gradients = [parameter.grad for parameter in held]
        for parameter in held:
            parameter.grad = None
        return gradients

    def _put_gradients(self, gradients: list[Tensor | None]) -> None:
        for slot, gradient in zip(self._made.slots, gradients, strict=True):
            self._sharding.optimizer_parameter(slot).grad = gradient

    def _then_follow(self, module: pl.LightningModule, name: str) -> Callable[..., None]:
        """Freezing an optimizer's parameters freezes the whole ones that the module computes with."""

        def follow(*arguments: Any, **options: Any) -> None:
            getattr(type(module), name)(module, *arguments, **options)
            for slot in self._made.slots:
                slot.parameter.requires_grad_(self._sharding.optimizer_parameter(slot).requires_grad)

        return follow
