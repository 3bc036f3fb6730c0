"""One MLflow run a job, of the first rank, that goes on with the next attempt and never stops the job.

Lightning's logger makes a client on every rank: where the store is a file all of them would make its tables at the same time. Its
own default, a folder of files, is refused by MLflow 3.17.
"""

from __future__ import annotations

import json
import logging
import os
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit, urlunsplit

from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch.loggers import MLFlowLogger
from lightning.pytorch.loggers.logger import Logger
from lightning_utilities.core.rank_zero import rank_zero_only, rank_zero_warn

from hybrid_strategy.reporting.manners import Nothing, short

RUN_FILE = "mlflow.json"
"""In the run folder: which run of which store this is."""


class MlflowRunLogger(MLFlowLogger):
    """Lightning's MLFlowLogger with the manners above.

    Args:
        experiment_name, run_name, tags, artifact_location: as MLflow has them.
        tracking_uri: None: what `MLFLOW_TRACKING_URI` says, else the database `mlflow.db` in `save_dir`.
        save_dir: where that database is; None: here.
        run_dir: the run folder, in which `mlflow.json` names the run for the next attempt; None: each attempt is a new run.
    """

    def __init__(
        self,
        experiment_name: str = "hybrid-strategy",
        run_name: str | None = None,
        tracking_uri: str | None = None,
        save_dir: str | None = None,
        run_dir: str | None = None,
        tags: Mapping[str, str] | None = None,
        artifact_location: str | None = None,
    ) -> None:
        Logger.__init__(self)
        folder = Path(save_dir or ".").absolute()
        self._experiment_name, self._tracking_uri = experiment_name, _signed_in(tracking_uri or _store(folder))
        self._file = Path(run_dir) / RUN_FILE if run_dir is not None else None
        self._problem: str | None = None
        self._run_id, self._experiment_id, self._initialized, self._prefix = None, None, False, ""
        self._log_model, self._checkpoint_callback, self._goes_on = False, None, False
        self.tags = dict(tags or {})
        if getattr(rank_zero_only, "rank", 0) == 0:
            given = {"run_name": run_name, "tags": self.tags, "artifact_location": artifact_location}
            self._attempt(lambda: self._make(folder, given))

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """MLflow's client; an object that takes every call and does nothing where there is none."""
        if self._problem is not None:
            return Nothing()
        return MLFlowLogger.experiment.fget(self)  # type: ignore[attr-defined]

    @property
    def name(self) -> str:
        return self._experiment_name

    @property
    def version(self) -> str | None:
        """The run's id; None on all ranks but the first."""
        return self._run_id

    @property
    def run_id(self) -> str | None:
        return self._run_id

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace) -> None:
        """Parameters of a run never change: those of its first attempt stay."""
        if not self._goes_on:
            self._attempt(lambda: MLFlowLogger.log_hyperparams(self, params))

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self._attempt(lambda: MLFlowLogger.log_metrics(self, metrics, step))

    @rank_zero_only
    def finalize(self, status: str = "success") -> None:
        self._attempt(lambda: MLFlowLogger.finalize(self, status))

    def where(self) -> dict[str, Any]:
        """How to see the run: its id and store, or the `problem`."""
        return {"problem": self._problem} if self._problem else {"id": self._run_id, "store": _shown(self._tracking_uri)}

    def _make(self, folder: Path, given: dict[str, Any]) -> None:
        for talker in ("alembic", "mlflow.store", "lightning.pytorch.loggers.mlflow"):  # of every table and experiment made
            logging.getLogger(talker).setLevel(logging.ERROR)
        os.makedirs(folder, exist_ok=True)
        known = self._known()
        self._goes_on = known is not None
        MLFlowLogger.__init__(self, self._experiment_name, tracking_uri=self._tracking_uri, run_id=known, **given)
        client = self.experiment
        if self._goes_on:
            client.update_run(self._run_id, status="RUNNING")
        if self._file is not None:
            self._file.write_text(json.dumps({"run_id": self._run_id, "store": _shown(self._tracking_uri)}), encoding="utf-8")

    def _known(self) -> str | None:
        """The run of an earlier attempt in this folder, in the same store."""
        try:
            known = json.loads(self._file.read_text(encoding="utf-8")) if self._file is not None else {}
        except (OSError, ValueError):
            return None
        return str(known["run_id"]) if known.get("store") == _shown(self._tracking_uri) else None

    def _attempt(self, function: Any) -> None:
        if self._problem is not None:
            return
        try:
            function()
        except Exception as error:
            self._problem = short(error).replace(self._tracking_uri, _shown(self._tracking_uri))
            rank_zero_warn(f"MLflow does not work ({self._problem}): the run goes on without it.")


def _store(folder: Path) -> str:
    return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{folder / 'mlflow.db'}"


def _signed_in(uri: str) -> str:
    """The URI of a server without user and password, which MLflow then finds in the environment: it prints its URI."""
    parts = urlsplit(uri)
    if parts.scheme not in ("http", "https") or "@" not in parts.netloc:
        return uri
    os.environ["MLFLOW_TRACKING_USERNAME"] = unquote(parts.username or "")
    os.environ["MLFLOW_TRACKING_PASSWORD"] = unquote(parts.password or "")
    return _shown(uri)


def _shown(uri: str) -> str:
    """The URI as it may stand in files. A database's keeps its password for MLflow alone."""
    parts = urlsplit(uri)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2])) if "@" in parts.netloc else uri
