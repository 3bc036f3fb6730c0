"""Signals only set a flag. The ranks agree on it at the end of a step, save that step together, and leave.

Lightning saves inside the signal handler, a collective at a point where ranks are not: under a pipeline, or with one slow rank,
that hangs until the job is killed and nothing is saved (lightning 2.6, trainer/connectors/signal_connector.py).
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from types import FrameType
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist

from hybrid_strategy.errors import PreemptedError
from hybrid_strategy.files import write_json
from hybrid_strategy.strategy._lightning import ready_to_step

PREEMPTED_FILE = "preempted.json"
SIGNALS_VARIABLE = "HYBRID_STRATEGY_STOP_SIGNALS"
"""Names of the signals to listen to, e.g. `USR1,TERM`; whoever starts the ranks knows what it sends."""

RECEIVED_VARIABLE = "HYBRID_STRATEGY_STOP_RECEIVED"
"""Number of a signal that came before anything could be saved (`launch/slurm_rank.py`)."""

_PREFIX = "preempted-step"
_SLOW_SECONDS = 1.0
"""Steps longer than this wait for each other's flag at once; shorter ones look at it a step later, which costs nothing."""


class StopAtSignal(pl.Callback):
    """Ends the run with `PreemptedError` (exit code 75) at the step after a signal, when a checkpoint of it is written.

    Attributes:
        received: the number of the signal that came, 0: none.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        names = os.environ.get(SIGNALS_VARIABLE, "USR1").split(",")
        self._signals = [signal.Signals[f"SIG{name.strip()}"] for name in names if name.strip()]
        self._before: dict[int, Any] = {}
        self._pending: tuple[Any, torch.Tensor] | None = None
        self._slow, self._step_began = False, time.monotonic()
        self.received = int(os.environ.pop(RECEIVED_VARIABLE, "0"))

    def listen(self) -> None:
        """Puts the handlers in place; again after Lightning has put its own there."""
        for number in self._signals:
            handler = signal.signal(number, self._note)
            if handler != self._note:
                self._before.setdefault(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = number

    def on_sanity_check_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.listen()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.listen()
        self._step_began = time.monotonic()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not ready_to_step(trainer):  # gradients of this batch would be lost
            return
        number = self._agreed(trainer)
        self._step_began = time.monotonic()
        if number:
            self._leave(trainer, number)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._pending is not None:
            self._pending[0].wait()
            self._pending = None

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self._before.clear()

    def _agreed(self, trainer: pl.Trainer) -> int:
        """The signal that any rank has received, the same answer on all of them in the same step."""
        if trainer.world_size == 1 or not dist.is_initialized():
            return self.received
        slow = time.monotonic() - self._step_began > _SLOW_SECONDS
        values = torch.tensor([self.received, int(slow)], device=trainer.strategy.root_device)
        earlier, self._pending = self._pending, (dist.all_reduce(values, dist.ReduceOp.MAX, async_op=True), values)
        if self._slow:
            if earlier is not None:
                earlier[0].wait()
            earlier, self._pending = self._pending, None
        if earlier is None:
            return 0
        earlier[0].wait()
        number, slow_somewhere = (int(each) for each in earlier[1].tolist())
        self._slow = bool(slow_somewhere)
        return number

    def _leave(self, trainer: pl.Trainer, number: int) -> None:
        """Saves, says so in a file, and raises.

        Raises:
            PreemptedError: on every rank.
        """
        if self._pending is not None:
            self._pending[0].wait()
            self._pending = None
        step = trainer.global_step
        path = self._run_dir / "checkpoints" / f"{_PREFIX}{step:06d}.ckpt"
        trainer.save_checkpoint(path)
        if trainer.is_global_zero:
            values = {"step": step, "checkpoint": str(path), "signal": signal.Signals(number).name, "time": time.time()}
            write_json(self._run_dir / PREEMPTED_FILE, values)
        for old in self._run_dir.glob(f"checkpoints/{_PREFIX}*.ckpt"):
            if old != path:
                trainer.strategy.remove_checkpoint(old)
        trainer.strategy.barrier("stopped by a signal")
        raise PreemptedError(f"stopped by {signal.Signals(number).name} after step {step}; saved in {path}")
