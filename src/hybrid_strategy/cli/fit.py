"""What every rank of `hybrid train` runs: the objects of the configuration, then Lightning's fit."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from textwrap import indent
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Checkpoint, DeviceStatsMonitor, LearningRateMonitor, ProgressBar
from lightning.pytorch.loggers import TensorBoardLogger

from hybrid_strategy.callbacks.beside import ForecastBesideMeasured
from hybrid_strategy.callbacks.progress import PrepareProgress
from hybrid_strategy.callbacks.results import RunResults
from hybrid_strategy.callbacks.status import STATUS_FILE, RunStatus
from hybrid_strategy.checkpoint.folder import remove_unfinished
from hybrid_strategy.checkpoint.verify import read_meta
from hybrid_strategy.config.build import build_all, build_data, build_module, build_trainer
from hybrid_strategy.config.forecasting import doubt_of, expected, forecast_of
from hybrid_strategy.config.plan import RunPlan, by_full_key, plan_of
from hybrid_strategy.config.settings import RunConfig
from hybrid_strategy.config.storage import PREEMPTED_FILE, RESULT_FILE, as_values, read_config, yaml_of
from hybrid_strategy.config.targets import BY_TARGET, CsvSettings, TensorBoardSettings, WandbSettings
from hybrid_strategy.errors import ConfigError
from hybrid_strategy.files import read_json, write_json
from hybrid_strategy.modules.text_data import TextDataModule
from hybrid_strategy.reporting.mlflow_run import MlflowRunLogger
from hybrid_strategy.reporting.noise import keep_terminal_clear
from hybrid_strategy.reporting.wandb_run import WandbRunLogger
from hybrid_strategy.reporting.wandb_tables import environment, plan_tables, rank_table, summary_of
from hybrid_strategy.strategy.account import WANDB_ID
from hybrid_strategy.strategy.stopping import StoppedBySignal


def run(run_dir: Path) -> None:
    """Trains as the run folder's `config.yaml` says and leaves `result.json` there; `preempted.json` where a signal came.

    Raises:
        ConfigError: Lightning refuses the configuration.
        StoppedBySignal: on every rank.
    """
    try:
        fit(run_dir)
    except MisconfigurationException as error:
        raise ConfigError(str(error)) from error
    except ConfigError as error:  # of the strategy, the model or the data, which know their own arguments
        raise type(error)(by_full_key(str(error))) from error


def fit(run_dir: Path) -> None:
    """The run itself."""
    config = read_config(run_dir)
    planned = plan_of(config)
    status = RunStatus(run_dir)
    keep_terminal_clear()
    _set_up_torch(config)
    pl.seed_everything(config.seed, workers=True, verbose=False)
    if _is_first():  # a run has its folder for itself; each kill in a save would leave a whole checkpoint's size there for ever
        remove_unfinished(run_dir / "checkpoints")
    callbacks, results = _allowed(config, list(build_all(config.callbacks, "callbacks").values())), RunResults()
    loggers = build_all(logger_settings(config), "logger")
    try:
        beside = ForecastBesideMeasured(expected(config, planned), doubt_of(config, planned))
        trainer = build_trainer(config, planned, [results, status, beside, *callbacks], list(loggers.values()))
        _log_configuration(list(loggers.values()), config, planned)
        module, data = build_module(config, planned), build_data(config, planned)
        if isinstance(data, TextDataModule) and _is_first():
            data.progress = PrepareProgress()
        started = time.monotonic()
        with _told_of_stop(trainer, run_dir):
            trainer.fit(module, datamodule=data, ckpt_path=config.resume)
        seconds = time.monotonic() - started
        if results.stale(trainer):
            trainer.validate(module, datamodule=data, verbose=False)
        if _is_first():
            found = {"seconds": seconds, **results.summary(trainer), **status.summary(), **beside.summary()}
            _write_result(run_dir, _with_earlier(found, run_dir), list(loggers.values()))
    finally:
        _close(loggers.values())


def _close(loggers: Iterable[Any]) -> None:
    for logger in loggers:
        if isinstance(logger, WandbRunLogger):
            logger.finish()


def logger_settings(config: RunConfig) -> dict[str, Any]:
    """The loggers' settings: files are in the run folder where nothing else is said; a run that goes on from a checkpoint goes
    on with the W&B run that wrote it."""
    known = read_meta(Path(config.resume)).get(WANDB_ID) if config.resume else None
    found = dict(config.logger)
    for name, values in found.items():
        if values is None:
            continue
        kind = BY_TARGET.get(str(values.get("_target_")))
        if kind is WandbSettings and known is not None and values["id"] is None:
            found[name] = {**values, "id": known}
        if kind in (CsvSettings, TensorBoardSettings) and values["save_dir"] is None:
            found[name] = {**values, "save_dir": config.paths.run_dir}
    return found


def _allowed(config: RunConfig, callbacks: list[Any]) -> list[Any]:
    """The callbacks without those that a Trainer with these switches, or without a logger, refuses to have."""
    logs = any(values is not None for values in config.logger.values())
    switches = (
        (config.trainer.enable_progress_bar, ProgressBar),
        (config.trainer.enable_checkpointing, Checkpoint),
        (logs, LearningRateMonitor),
        (logs, DeviceStatsMonitor),
    )
    unwanted = tuple(kind for switch, kind in switches if switch is False)
    return [each for each in callbacks if not isinstance(each, unwanted)]


@contextmanager
def _told_of_stop(trainer: pl.Trainer, run_dir: Path) -> Iterator[None]:
    """Leaves `preempted.json` and closes W&B's run before any rank leaves: the first that does may take the others with it."""
    try:
        yield
    except StoppedBySignal as stop:
        if trainer.is_global_zero:
            path = str(stop.checkpoint) if stop.checkpoint else None
            values = {"step": stop.step, "checkpoint": path, "signal": stop.name, "time": time.time()}
            write_json(run_dir / PREEMPTED_FILE, values)
        _close(trainer.loggers)
        trainer.strategy.barrier("stopped by a signal")
        raise


def _is_first() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _set_up_torch(config: RunConfig) -> None:
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    torch.set_float32_matmul_precision(config.precision.float32_matmul)


def _log_configuration(loggers: list[Any], config: RunConfig, planned: RunPlan) -> None:
    for logger in loggers if _is_first() else []:
        if isinstance(logger, (WandbRunLogger, MlflowRunLogger)):
            logger.log_hyperparams({**as_values(config), "plan": planned.to_dict(), "env": environment()})
        if isinstance(logger, WandbRunLogger):
            found = forecast_of(config, planned)
            for table in plan_tables(planned.plan, found.ledger if found else None):
                logger.log_rows(table.name, table.columns, table.rows)
        if isinstance(logger, TensorBoardLogger):  # a text, of which Markdown leaves lines that are indented as they are
            logger.experiment.add_text("config", indent(yaml_of(config), "    "))


def _with_earlier(summary: dict[str, Any], run_dir: Path) -> dict[str, Any]:
    """A run that went on at its last step has measured nothing: what the attempt before it had reached stands."""
    earlier = read_json(run_dir / STATUS_FILE) or {}
    names = ("tokens_per_second", "peak_memory_bytes")
    return summary | {name: earlier.get(name) for name in names if summary[name] is None}


def _write_result(run_dir: Path, summary: dict[str, Any], loggers: list[Any]) -> None:
    for logger in loggers:
        if isinstance(logger, WandbRunLogger):
            table = rank_table(summary["ranks"])
            logger.log_rows(table.name, table.columns, table.rows)
            logger.conclude(summary_of(summary))
            summary["wandb"] = logger.where()
    write_json(run_dir / RESULT_FILE, summary)
