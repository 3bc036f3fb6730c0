"""Notices a loss or a gradient that is not finite, on whichever rank; all ranks stop or skip together, and the place is told."""

from __future__ import annotations

import logging
import math
from typing import Any

import lightning.pytorch as pl
from torch import Tensor
from torch.optim import Optimizer

from hybrid_strategy.distributed.gradient_norm import total_norm
from hybrid_strategy.errors import ConfigError, RunError, message
from hybrid_strategy.strategy.hybrid import HybridParallelStrategy
from hybrid_strategy.strategy.non_finite import locate
from hybrid_strategy.strategy.precision import scaler_of

_log = logging.getLogger(__name__)
ACTIONS = ("stop", "skip")


class NonFiniteGuard(pl.Callback):
    """Stops, or leaves the step out, where a number is not finite, and says where it came from.

    The loss is that of the whole run on every rank, and of the gradients the norm of the whole model is taken, so that all ranks
    decide alike. The forward passes of that batch are played once more to find the first module, micro-batch, rank and samples.
    With a loss scaler (`16-mixed`) gradients that overflow are the scaler's business; a loss that is not finite is not.

    Args:
        action: `stop` raises on all ranks; `skip` leaves the optimizer step out and goes on.
        most_skips: with `skip`: steps that may be left out in a row before all ranks stop.
    """

    def __init__(self, action: str = "stop", most_skips: int = 10) -> None:
        if action not in ACTIONS:
            raise ConfigError(message("action", action, "it must be one of the known ones", "", f"Set {' or '.join(ACTIONS)}"))
        self.action, self.most_skips = action, most_skips
        self.skipped = 0
        self._in_a_row = 0
        self._window_is_bad = False

    def on_before_backward(self, trainer: pl.Trainer, module: pl.LightningModule, loss: Tensor) -> None:
        value = float(loss)
        if not math.isfinite(value):
            self._window_is_bad = True
            self._found(trainer, "loss", value)

    def on_before_optimizer_step(self, trainer: pl.Trainer, module: pl.LightningModule, optimizer: Optimizer) -> None:
        strategy = trainer.strategy
        if (
            not self._window_is_bad
            and isinstance(strategy, HybridParallelStrategy)
            and scaler_of(trainer.precision_plugin) is None
        ):
            norm = float(total_norm(strategy.owned_gradients(optimizer), 2.0, strategy.root_device))
            if not math.isfinite(norm):
                self._window_is_bad = True
                self._found(trainer, "gradient norm", norm)
        if not self._window_is_bad:
            self._in_a_row = 0
            return
        self._window_is_bad = False
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def _found(self, trainer: pl.Trainer, what: str, value: float) -> None:
        lines = "\n".join(line for each in locate(trainer) for line in each.lines())
        rule = f"every number of a training step must be finite, and this is not so in step {trainer.global_step}"
        advice = "Look at these samples, lower the learning rate, or set NonFiniteGuard(action='skip')"
        text = message(what, value, rule, f"First:\n{lines}\n", advice)
        self.skipped += 1
        self._in_a_row += 1
        if self.action == "stop" or self._in_a_row > self.most_skips:
            raise RunError(text)
        if trainer.is_global_zero:
            _log.warning("%s The step is left out; %d so far.", text, self.skipped)

    def state_dict(self) -> dict[str, Any]:
        return {"skipped": self.skipped}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.skipped = int(state_dict["skipped"])
