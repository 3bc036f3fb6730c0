"""Tokens a second of the whole run.

Data-parallel ranks are counted once each; tensor- and pipeline-parallel ranks work on the same tokens and are not counted again
(Lightning's ThroughputMonitor multiplies by the number of processes).
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import lightning.pytorch as pl

from hybrid_strategy.callbacks.tokens import count_tokens

METRIC = "throughput/tokens_per_second"


class Throughput(pl.Callback):
    """Logs `throughput/tokens_per_second` over the last `window_steps` batches, loading included; validation is not counted.

    Attributes:
        tokens: tokens of the whole run so far.
        seconds: time of the training batches behind them, without the first, which warms everything up.
    """

    def __init__(self, window_steps: int = 20) -> None:
        self._window: deque[tuple[int, float]] = deque(maxlen=window_steps)
        self._mark: float | None = None
        self._warm = False
        self.tokens = 0
        self.seconds = 0.0

    @property
    def tokens_per_second(self) -> float | None:
        """Over the window; None before the second batch."""
        seconds = sum(each for _, each in self._window)
        return sum(tokens for tokens, _ in self._window) / seconds if seconds > 0 else None

    @property
    def mean_tokens_per_second(self) -> float | None:
        """Over the whole run; None before the second batch."""
        return self.tokens / self.seconds if self.seconds > 0 else None

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        if self._mark is None:
            self._mark = time.perf_counter()

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._mark = None

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        now = time.perf_counter()
        elapsed, self._mark = now - (self._mark or now), now
        if not self._warm:
            self._warm = True
            return
        tokens = count_tokens(batch) * data_parallel_size(trainer)
        if tokens == 0:
            return
        self._window.append((tokens, elapsed))
        self.tokens += tokens
        self.seconds += elapsed
        if self.tokens_per_second is not None:
            pl_module.log(METRIC, self.tokens_per_second, on_step=True, on_epoch=False)


def data_parallel_size(trainer: pl.Trainer) -> int:
    """Ranks that read different samples: all of them, unless the strategy has a layout that says otherwise."""
    layout = getattr(trainer.strategy, "layout", None)
    size = getattr(layout, "data_parallel_size", trainer.world_size)
    return int(size)
