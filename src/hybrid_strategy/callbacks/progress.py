"""One line that says how far the run is, its losses and its speed; rewritten on a terminal, now and then in a log."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ProgressBar

from hybrid_strategy.callbacks.steps import total_steps
from hybrid_strategy.callbacks.throughput import Throughput
from hybrid_strategy.units import format_bytes, format_seconds

_BAR_CELLS = 20
_ERASE = "\r\x1b[2K"


class PrepareProgress:
    """The line while text is prepared: `tokenizer 40 %`. Takes phase, bytes done and bytes in all."""

    def __init__(self, every_seconds: float = 1.0) -> None:
        self._every, self._shown_at, self._phase = every_seconds, 0.0, ""

    def __call__(self, phase: str, done_bytes: int, total_bytes: int) -> None:
        now, live, finished = time.monotonic(), sys.stdout.isatty(), done_bytes >= total_bytes
        if not finished and (not live or now - self._shown_at < self._every) and phase == self._phase:
            return
        self._phase, self._shown_at = phase, now
        share = min(1.0, done_bytes / total_bytes) if total_bytes else 1.0
        start, end = (_ERASE, "\n" if finished else "") if live else ("", "\n")
        sys.stdout.write(f"{start}preparing text: {phase} {share:.0%} of {format_bytes(total_bytes)}{end}")
        sys.stdout.flush()


class ProgressLine(ProgressBar):
    """`step 40/200 |####      | train/loss 5.31  1,234 tokens/s  1 min 3 s left`.

    Args:
        refresh_seconds: time between two states of the line on a terminal.
        plain_seconds: time between two lines where the output is no terminal.
    """

    def __init__(self, refresh_seconds: float = 0.5, plain_seconds: float = 10.0) -> None:
        super().__init__()
        self._refresh, self._plain = refresh_seconds, plain_seconds
        self._enabled = True
        self._shown_at = 0.0
        self._open = False
        self._first_step: int | None = None
        self._started = 0.0

    def enable(self) -> None:
        self._enabled = True

    def disable(self) -> None:
        self._enabled = False

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Text in place of the line, which comes again below it."""
        if self._open:
            sys.stdout.write(_ERASE)
            self._open = False
        sys.stdout.write(kwargs.get("sep", " ").join(map(str, args)) + "\n")

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._first_step, self._started = trainer.global_step, time.monotonic()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        last = trainer.global_step >= total_steps(trainer)
        self._show(self._text(trainer, pl_module), force=last)

    def on_validation_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        totals = trainer.num_sanity_val_batches if trainer.sanity_checking else trainer.num_val_batches
        self._show(f"step {trainer.global_step}  validation {batch_idx + 1}/{totals[dataloader_idx]}")

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        losses = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("val")}
        if losses and self._enabled:
            shown = "  ".join(f"{name} {value:.4f}" for name, value in losses.items() if not name.endswith(("_step", "_epoch")))
            self.print(f"step {trainer.global_step}  {shown}")

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._end_line()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._end_line()

    def _text(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> str:
        step, total = trainer.global_step, total_steps(trainer)
        words = [f"step {step}/{total:.0f}" if total < float("inf") else f"step {step}"]
        if total < float("inf") and total > 0:
            done = min(_BAR_CELLS, int(_BAR_CELLS * step / total))
            words.append(f"|{'#' * done}{' ' * (_BAR_CELLS - done)}|")
        metrics = {name: value for name, value in self.get_metrics(trainer, pl_module).items() if name != "v_num"}
        words += [f"{name} {value:.4f}" if isinstance(value, float) else f"{name} {value}" for name, value in metrics.items()]
        speed = next((each.tokens_per_second for each in trainer.callbacks if isinstance(each, Throughput)), None)  # type: ignore[attr-defined]
        if speed is not None:
            words.append(f"{speed:,.0f} tokens/s")
        left = self._seconds_left(step, total)
        if left is not None:
            words.append(f"{format_seconds(left)} left")
        return "  ".join(words)

    def _seconds_left(self, step: int, total: float) -> float | None:
        if self._first_step is None or step <= self._first_step or not step < total < float("inf"):
            return None
        return (time.monotonic() - self._started) / (step - self._first_step) * (total - step)

    def _show(self, text: str, force: bool = False) -> None:
        live = sys.stdout.isatty()
        now = time.monotonic()
        if not self._enabled or (not force and now - self._shown_at < (self._refresh if live else self._plain)):
            return
        self._shown_at = now
        if live:
            sys.stdout.write(f"{_ERASE}{text[: _columns() - 1]}")
            self._open = True
        else:
            sys.stdout.write(text + "\n")
        sys.stdout.flush()

    def _end_line(self) -> None:
        if self._open:
            sys.stdout.write("\n")
            sys.stdout.flush()
            self._open = False


def _columns() -> int:
    """Width of the terminal; a longer line would wrap and could not be rewritten."""
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns or 80
    except (OSError, ValueError):
        return 1000
