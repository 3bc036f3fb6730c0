"""Lightning's own callbacks that look at parameters: they are shown the whole model, given this rank's pieces, or refused."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    BasePredictionWriter,
    Callback,
    ModelCheckpoint,
    ModelPruning,
    ModelSummary,
    OnExceptionCheckpoint,
    WeightAveraging,
)
from lightning.pytorch.callbacks import StochasticWeightAveraging as _SWA  # noqa: N814
from lightning.pytorch.callbacks.throughput_monitor import ThroughputMonitor
from lightning.pytorch.trainer.states import TrainerFn

from hybrid_strategy.checkpoint.folder import refuse_url
from hybrid_strategy.errors import ConfigError, message
from hybrid_strategy.parallel.ghosts import leave_out_ghosts
from hybrid_strategy.parallel.stages import whole_model_shown
from hybrid_strategy.parallelize import Parallelized
from hybrid_strategy.spec.layout import Layout
from hybrid_strategy.strategy.averages import ShardedAverage
from hybrid_strategy.strategy.predictions import keep_padding_from
from hybrid_strategy.strategy.whole_shapes import whole_shapes_shown


def prepare_callbacks(trainer: pl.Trainer, layout: Layout) -> None:
    """Before any callback is set up: refuses those that need whole parameters on every rank.

    Raises:
        ConfigError: a callback that cannot work in this layout.
    """
    for callback in _callbacks(trainer):
        if isinstance(callback, (_SWA, ModelPruning)) and _is_split(layout):
            kind = type(callback).__name__
            rule = "it copies or rewrites whole parameters, which no rank of this layout has"
            other = "EMAWeightAveraging of lightning.pytorch.callbacks, or " if isinstance(callback, _SWA) else ""
            advice = f"Use {other}sharding='ddp' without tensor and pipeline parallelism"
            raise ConfigError(message("callbacks", kind, rule, f"The layout is {layout.name}", advice))
        refuse_url("dirpath", str(getattr(callback, "dirpath", None) or ""))
        saves = isinstance(callback, OnExceptionCheckpoint) or getattr(callback, "save_on_exception", False)
        if saves and layout.world_size > 1:
            kind = type(callback).__name__ + ("(save_on_exception=True)" if isinstance(callback, ModelCheckpoint) else "")
            rule = "all ranks write a checkpoint together, and an exception may come to one of them only"
            advice = "Use ModelCheckpoint(every_n_train_steps=...) or (train_time_interval=...)"
            raise ConfigError(message("callbacks", kind, rule, f"The layout is {layout.name}", advice))
        if isinstance(callback, ModelCheckpoint):
            _take_names_being_written(callback)
        if isinstance(callback, WeightAveraging):
            vars(callback)["setup"] = _nothing  # it would copy the whole model; `adapt_callbacks` gives it this rank's pieces


def adapt_callbacks(trainer: pl.Trainer, module: pl.LightningModule, made: Parallelized) -> ShardedAverage | None:
    """After the model is parallelised: shows callbacks what they look for.

    Returns:
        The weight average that checkpoints must keep, if there is one.
    """
    average = None
    for callback in _callbacks(trainer):
        if isinstance(callback, ModelSummary):
            _within(callback, "on_fit_start", lambda: whole_shapes_shown(module, made))
        elif isinstance(callback, BaseFinetuning):
            for hook in ("on_fit_start", "on_train_epoch_start"):
                _within(callback, hook, lambda: whole_model_shown(module), lambda: _leave_out_ghosts(trainer))
        elif isinstance(callback, WeightAveraging) and trainer.state.fn == TrainerFn.FITTING:
            average = ShardedAverage(callback, module, made)
        elif isinstance(callback, BasePredictionWriter) and _data_parallel_size(trainer) > 1:
            keep_padding_from(callback)
        elif isinstance(callback, ThroughputMonitor):
            for throughput in callback._throughputs.values():
                throughput.world_size = _data_parallel_size(trainer)  # tensor and pipeline peers work on the same samples
    return average


def _take_names_being_written(callback: ModelCheckpoint) -> None:
    """A name that is still being written in the background is taken, as one that is there: the next one gets a number."""

    def file_exists(filepath: Any, trainer: pl.Trainer) -> bool:
        strategy: Any = trainer.strategy
        return type(callback).file_exists(callback, filepath, trainer) or strategy.writer.is_writing(Path(filepath))

    vars(callback)["file_exists"] = file_exists


def _callbacks(trainer: pl.Trainer) -> list[Callback]:
    return list(trainer.callbacks)  # type: ignore[attr-defined]


def _is_split(layout: Layout) -> bool:
    return layout.state_shards > 1 or layout.tensor_parallel_size > 1 or layout.pipeline_parallel_size > 1


def _data_parallel_size(trainer: pl.Trainer) -> int:
    layout: Layout = trainer.strategy.layout  # type: ignore[attr-defined]
    return layout.data_parallel_size


def _nothing(*_arguments: Any, **_options: Any) -> None:
    """Stands for a hook that must not run."""


def _leave_out_ghosts(trainer: pl.Trainer) -> None:
    for optimizer in trainer.strategy.optimizers:
        leave_out_ghosts(optimizer)


def _within(
    callback: Callback, hook: str, context: Callable[[], AbstractContextManager[Any]], after: Callable[[], None] = _nothing
) -> None:
    """Runs a hook of `callback` within a context."""

    def around(*arguments: Any) -> None:
        with context():
            getattr(type(callback), hook)(callback, *arguments)
        after()

    setattr(callback, hook, around)
