"""The forecast of a run beside what is measured: step time, tokens a second, memory, bubble."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from statistics import median
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist

from hybrid_strategy.callbacks.status import peak_memory_bytes
from hybrid_strategy.callbacks.throughput import data_parallel_size
from hybrid_strategy.callbacks.tokens import count_tokens
from hybrid_strategy.parallel.stopwatch import Stopwatch
from hybrid_strategy.units import format_bytes, format_seconds

STEPS = 20
"""Steps after which the forecast is set beside what was measured."""

WARM_UP = 3
"""Steps at the start that are not measured."""

Values = dict[str, float]


class ForecastBesideMeasured(pl.Callback):
    """Measures the steps `WARM_UP` to `STEPS` of a fit (of a shorter one, what there is), prints and logs both.

    Args:
        forecast: `step_seconds`, `tokens_per_second`, `peak_memory_bytes`, `bubble_fraction`; None: only measured values.
        doubt: why the forecast is not to be relied on, said with it; empty where there is no reason.

    Attributes:
        measured: the same of this run, once it is known; of the first rank.
    """

    def __init__(self, forecast: Mapping[str, float] | None, doubt: str = "") -> None:
        self.doubt = doubt
        self.forecast = dict(forecast) if forecast is not None else None
        self.measured: Values | None = None
        self._seconds: list[float] = []
        self._plays: list[tuple[float, float]] = []
        self._tokens, self._seen = 0, 0
        self._mark: float | None = None
        self._watch: Stopwatch | None = None

    def summary(self) -> dict[str, Any]:
        """Plain values for `result.json`."""
        return {"forecast": self.forecast, "measured": self.measured}

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        player = _player(trainer)
        if player is not None:
            self._watch = player.stopwatch = Stopwatch(trainer.strategy.root_device)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._mark = None

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        if self._mark is None and self.measured is None:
            self._mark = _now(trainer)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self.measured is not None or self._seen < 0:
            return
        now = _now(trainer)
        elapsed, self._mark = now - (self._mark or now), now
        self._seen += 1
        if self._seen <= WARM_UP:
            return
        self._seconds.append(elapsed)
        self._tokens = count_tokens(batch)
        if self._watch is not None:
            self._plays.append((self._watch.span_seconds, self._watch.waited_seconds))
        if self._seen >= STEPS * trainer.accumulate_grad_batches:
            self._close(trainer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._seen > WARM_UP:
            self._close(trainer)

    def _close(self, trainer: pl.Trainer) -> None:
        """All ranks come here at the same step."""
        self._seen = -1
        player = _player(trainer)
        if player is not None:
            player.stopwatch = None
        found = self._together(trainer)
        if not trainer.is_global_zero:
            return
        self.measured = found
        values = {f"measured/{name}": value for name, value in found.items()}
        values |= {f"forecast/{name}": value for name, value in (self.forecast or {}).items()}
        for logger in trainer.loggers:
            logger.log_metrics(values, step=trainer.global_step)
        _say(trainer, beside(self.forecast, found, self.doubt))

    def _together(self, trainer: pl.Trainer) -> Values:
        """The slowest rank's step, the fullest rank's memory, the busiest rank's waiting."""
        device = trainer.strategy.root_device
        span, busy = (
            (median(each) for each in zip(*[(s, s - w) for s, w in self._plays], strict=True)) if self._plays else (0.0, 0.0)
        )
        mine = [median(self._seconds), float(peak_memory_bytes(device)), span, busy]
        box: list[Any] = [mine]
        if dist.is_initialized() and trainer.world_size > 1:
            box = [None] * trainer.world_size
            dist.all_gather_object(box, mine)
        batch, memory, span, busy = (max(values) for values in zip(*box, strict=True))
        found = {"step_seconds": batch * trainer.accumulate_grad_batches, "peak_memory_bytes": memory}
        if self._tokens:
            found["tokens_per_second"] = self._tokens * data_parallel_size(trainer) / batch
        if span:
            found["bubble_fraction"] = 1 - busy / span
        return found


def beside(forecast: Mapping[str, float] | None, measured: Mapping[str, float], doubt: str = "") -> str:
    """One line: measured, and in brackets what was forecast; `doubt`: why that is not to be relied on.

    >>> beside({"step_seconds": 0.11, "bubble_fraction": 0.2}, {"step_seconds": 0.1, "bubble_fraction": 0.25})
    'measured (forecast): step 100 ms (110 ms, +10 %), bubble 25.0% (20.0%)'
    """
    shown = {
        "step_seconds": ("step", format_seconds),
        "tokens_per_second": ("tokens/s", "{:,.0f}".format),
        "peak_memory_bytes": ("peak memory", format_bytes),
        "bubble_fraction": ("bubble", "{:.1%}".format),
    }
    words = []
    for name, (word, form) in shown.items():
        if name not in measured:
            continue
        text = f"{word} {form(measured[name])}"
        if forecast is not None and name in forecast:
            off = "" if name == "bubble_fraction" else f", {forecast[name] / measured[name] - 1:+.0%}".replace("%", " %")
            text += f" ({form(forecast[name])}{off})"
        words.append(text)
    told = f"; {doubt}" if forecast and doubt else ""
    return f"measured{' (forecast)' if forecast else ''}: {', '.join(words)}{told}"


def _player(trainer: pl.Trainer) -> Any:
    engine = getattr(trainer.strategy, "engine", None)
    return getattr(engine, "player", None)


def _now(trainer: pl.Trainer) -> float:
    if trainer.strategy.root_device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def _say(trainer: pl.Trainer, text: str) -> None:
    bar = trainer.progress_bar_callback
    if bar is not None:
        bar.print(text)
    else:
        sys.stdout.write(text + "\n")
