"""Where a run stands, in a file that others can read while it trains; and what each rank needed, when it is done."""

from __future__ import annotations

import resource
import socket
import sys
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist

from hybrid_strategy.callbacks.steps import total_steps
from hybrid_strategy.callbacks.throughput import Throughput
from hybrid_strategy.files import write_json

STATUS_FILE = "status.json"


class RunStatus(pl.Callback):
    """Writes `status.json` from the first rank, at most once in `every_seconds`.

    Attributes:
        ranks: after training, one mapping a rank: its host, its place in the mesh, its peak of memory.
    """

    def __init__(self, run_dir: Path, every_seconds: float = 1.0) -> None:
        self._path, self._every = run_dir / STATUS_FILE, every_seconds
        self._written_at = 0.0
        self._first_step, self._started = 0, 0.0
        self.ranks: list[dict[str, Any]] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._first_step, self._started = trainer.global_step, time.monotonic()
        self._write(trainer)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if time.monotonic() - self._written_at >= self._every:
            self._write(trainer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._write(trainer)
        mine = self._mine(trainer)
        self.ranks = [mine]
        if dist.is_initialized() and trainer.world_size > 1:
            box: list[Any] = [None] * trainer.world_size
            dist.all_gather_object(box, mine)
            self.ranks = box

    def summary(self) -> dict[str, Any]:
        """Plain values for `result.json`."""
        peaks = [each["peak_memory_bytes"] for each in self.ranks]
        return {"peak_memory_bytes": max(peaks, default=None), "ranks": self.ranks}

    def _write(self, trainer: pl.Trainer) -> None:
        if not trainer.is_global_zero:
            return
        self._written_at = time.monotonic()
        total, done = total_steps(trainer), trainer.global_step - self._first_step
        elapsed = self._written_at - self._started
        finite = total < float("inf")
        values = {
            "step": trainer.global_step,
            "total_steps": int(total) if finite else None,
            "loss": _loss(trainer),
            "tokens_per_second": _speed(trainer),
            "peak_memory_bytes": peak_memory_bytes(trainer.strategy.root_device),
            "seconds_left": elapsed / done * (total - trainer.global_step) if finite and done > 0 else None,
            "time": time.time(),
        }
        with suppress(OSError):  # training does not end because nobody can look at it for a while
            write_json(self._path, values)

    def _mine(self, trainer: pl.Trainer) -> dict[str, Any]:
        values: dict[str, Any] = {"rank": trainer.global_rank, "host": socket.gethostname()}
        layout = getattr(trainer.strategy, "layout", None)
        if layout is not None:
            values |= asdict(layout.coordinate(trainer.global_rank))
        return {**values, "peak_memory_bytes": peak_memory_bytes(trainer.strategy.root_device)}


def peak_memory_bytes(device: torch.device) -> int:
    """What torch has allocated on the GPU at most; on the CPU the most that the process has held, libraries included."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _loss(trainer: pl.Trainer) -> float | None:
    """The training loss as it was last logged."""
    found = [name for name in trainer.callback_metrics if "loss" in name and not name.startswith(("val", "test"))]
    return float(trainer.callback_metrics[min(found, key=len)]) if found else None


def _speed(trainer: pl.Trainer) -> float | None:
    return next((each.tokens_per_second for each in trainer.callbacks if isinstance(each, Throughput)), None)  # type: ignore[attr-defined]
