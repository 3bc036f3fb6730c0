"""One W&B run a job, on rank 0, that never stops the job: no server, no key, no package are a warning.

Online where a key is set, else offline in the run folder; `wandb sync` uploads such a run later. The end waits a bounded time
for the upload (a helper process of wandb's may otherwise hold a node until its time limit).
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time
from argparse import Namespace
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.loggers.logger import Logger
from lightning_utilities.core.rank_zero import rank_zero_only, rank_zero_warn

from hybrid_strategy.checkpoint.stop_request import REQUEST, signals_to_hear
from hybrid_strategy.reporting.manners import Nothing, short
from hybrid_strategy.reporting.wandb_mode import resolve_mode

_SUMMARIES = {
    "train_loss": "last,min",
    **dict.fromkeys(("val_loss", "val/loss", "validation/loss"), "last,min"),
    "throughput/tokens_per_second": "last,mean,max",
}
"""What the run's summary says of a metric; of others it is the last value."""

_FLUSH_SECONDS = 1.0
"""How often wandb writes a run's rows to its file; by itself every 15 s, and what is not written dies with its helper process."""

_ROWS = 1000
"""Rows that are kept for the case that they die there; more than are logged between two such writes."""


class WandbRunLogger(WandbLogger):
    """Lightning's WandbLogger with the manners above.

    Slurm sends a signal to all processes of a job, and wandb's helper process ends at once of most of them. What is logged from
    then on, until the ranks have stopped, goes into a second part of the same run when it is closed.

    Args:
        project: W&B project; `entity`, `name`, `group`, `job_type`, `notes`, `tags`, `id` are those of `wandb.init`.
        mode: `auto`, `online`, `offline` or `disabled`; `WANDB_MODE` decides where it is `auto`.
        save_dir: the run folder; an offline run lies in its `wandb/`.
        init_timeout: seconds that the server may take to answer before the run goes on offline.
        finish_timeout: seconds to wait for the upload at the end.
    """

    def __init__(
        self,
        project: str = "hybrid-strategy",
        name: str | None = None,
        save_dir: str | None = None,
        mode: str = "auto",
        tags: Sequence[str] = (),
        init_timeout: float = 20.0,
        finish_timeout: float = 30.0,
        **init: Any,
    ) -> None:
        self._problem: str | None = None
        self._finish_timeout, self._init_timeout = finish_timeout, init_timeout
        self._mode = resolve_mode(mode)
        self._finished = self._cut_off = False
        self._rows: deque[tuple[float, Mapping[str, float], int | None]] = deque(maxlen=_ROWS)
        self._parameters: list[dict[str, Any] | Namespace] = []
        arguments = {key: value for key, value in init.items() if value is not None} | {"tags": list(tags)}
        try:
            super().__init__(project=project, name=name, save_dir=save_dir or ".", **arguments)
            self._wandb_init.pop("anonymous", None)  # wandb 0.31 warns that it does nothing
        except ModuleNotFoundError as error:
            Logger.__init__(self)
            self._experiment, self._name, self._id, self._project, self._save_dir = None, name, None, project, save_dir
            self._prefix, self._checkpoint_callbacks, self._log_model = "", {}, False
            self._give_up(error)

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """The W&B run; an object that takes every call and does nothing where there is none."""
        if self._experiment is None and self._problem is None:
            self._experiment = self._start()
        return self._experiment if self._problem is None else Nothing()

    def log_hyperparams(self, params: dict[str, Any] | Namespace) -> None:
        self._parameters.append(params)
        self._attempt(super().log_hyperparams, params)

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self._rows.append((time.time(), metrics, step))
        self._attempt(super().log_metrics, metrics, step)

    @rank_zero_only
    def log_rows(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """A table of the run, as `log_table` without what only notebooks have."""
        self._attempt(super().log_table, name, list(columns), [list(row) for row in rows])

    @rank_zero_only
    def conclude(self, summary: Mapping[str, Any]) -> None:
        """Values of the run's summary that are no metrics."""
        self._attempt(lambda: self.experiment.summary.update(dict(summary)))

    @rank_zero_only
    def finish(self) -> None:
        """Closes the run; waits at most `finish_timeout` seconds, then lets the process end without it."""
        if self._experiment is None or self._finished:
            return
        self._finished = True
        thread = threading.Thread(target=self._close, daemon=True, name="wandb-finish")
        thread.start()
        thread.join(self._finish_timeout)
        if thread.is_alive():
            rank_zero_warn(
                f"W&B is still uploading after {self._finish_timeout:g} s, which the run does not wait for. "
                f"Upload the rest with: wandb sync {self.where().get('dir')}"
            )
            atexit.register(_leave)  # runs before wandb's own handler, which would wait

    def _close(self) -> None:
        if not self._cut_off:
            try:
                self.experiment.finish()
                return
            except Exception as error:
                if not REQUEST.signal_number:
                    self._give_up(error)
                    return
        self._attempt(self._log_the_rest)
        self._attempt(lambda: self.experiment.finish())

    def _log_the_rest(self) -> None:
        """A second part of the run, for the rows that were logged after the last ones that its file has."""
        import wandb

        run: Any = self._experiment
        self._wandb_init["id"], path = run.id, Path(run.settings.sync_file)
        written = path.stat().st_mtime if path.exists() else 0.0
        with suppress(Exception):  # it cannot say goodbye to a process that is gone
            wandb.teardown()
        self._experiment, self._cut_off = self._start(), False
        for parameters in self._parameters:
            super().log_hyperparams(parameters)
        for at, metrics, step in self._rows:
            if at > written:
                super().log_metrics(metrics, step)

    def where(self) -> dict[str, Any]:
        """How to see the run: `url` where it is online, `dir` to sync where it is not, `problem` where there is none."""
        if self._problem is not None:
            return {"problem": self._problem}
        if self._experiment is None or self._mode == "disabled":
            return {}
        url = self._experiment.url if self._mode == "online" else None
        return {"mode": self._mode, "id": self._experiment.id, "url": url, "dir": str(Path(self._experiment.dir).parent)}

    def _start(self) -> Any:
        import wandb

        try:
            return self._init(wandb, self._mode)
        except Exception as error:
            if self._mode != "online":
                self._give_up(error)
                return None
            rank_zero_warn(f"W&B cannot be reached ({short(error)}): this run is logged offline.")
        self._mode = "offline"
        try:
            return self._init(wandb, "offline")
        except Exception as error:
            self._give_up(error)
            return None

    def _init(self, wandb: Any, mode: str) -> Any:
        # The process's output is the progress line and the rank's log: wandb may neither wrap it nor write into it.
        known = "x_transaction_log_flush_interval" in wandb.Settings.model_fields  # since wandb 0.30 or so it writes late
        further = {"x_transaction_log_flush_interval": _FLUSH_SECONDS} if known else {}
        settings = wandb.Settings(init_timeout=self._init_timeout, console="off", silent=True, **further)
        os.makedirs(self._save_dir or ".", exist_ok=True)
        with _held_back():
            run = wandb.init(**self._wandb_init, mode=mode, settings=settings, reinit="create_new")
        run.define_metric("trainer/global_step")
        run.define_metric("*", step_metric="trainer/global_step", step_sync=True)
        for name, summary in _SUMMARIES.items():
            run.define_metric(name, step_metric="trainer/global_step", step_sync=True, summary=summary)
        return run

    def _attempt(self, function: Any, *arguments: Any) -> None:
        if self._problem is not None or (self._cut_off and not self._finished):
            return
        try:
            function(*arguments)
        except Exception as error:
            if REQUEST.signal_number and not self._finished:
                self._cut_off = True
            else:
                self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self._problem = short(error)
        rank_zero_warn(f"W&B does not work ({self._problem}): the run goes on without it.")


@contextmanager
def _held_back() -> Iterator[None]:
    """Signals that a rank takes for requests to stop would end the helper process while it starts: it inherits this mask."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals_to_hear())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _leave() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
