"""What may stand in an open group, by `_target_`: the keys of what is shipped are typed, those of the user's own are free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from hybrid_strategy.config.settings import ClusterSettings, RunConfig
from hybrid_strategy.planning.numerics import Numerics, numerics_of
from hybrid_strategy.planning.refusals import REDUCE_DTYPES
from hybrid_strategy.spec.model_shape import ModelShape

LANGUAGE_MODEL = "hybrid_strategy.modules.language_model.LanguageModel"
TEXT_DATA = "hybrid_strategy.modules.text_data.TextDataModule"


@dataclass(frozen=True)
class LanguageModelSettings:
    """The fields of `ModelShape`, and how the model is made. `config`: the Hugging Face file that the sizes are from."""

    hidden_size: int
    num_layers: int
    num_attention_heads: int
    intermediate_size: int
    vocab_size: int
    sequence_length: int
    _target_: str = LANGUAGE_MODEL
    num_key_value_heads: int = 0
    head_dim: int = 0
    family: str = "llama"
    gated_mlp: bool = True
    tied_embeddings: bool = False
    bias: bool = False
    learned_positions: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    config: str | None = None


@dataclass(frozen=True)
class TextDataSettings:
    """The arguments of `TextDataModule`, with the batch of the whole run in place of one rank's.

    `sequence_length` and `vocab_size` are the model's unless they are given.
    """

    _target_: str = TEXT_DATA
    files: tuple[str, ...] = ()
    global_batch_size: int = 32
    sequence_length: int | None = None
    vocab_size: int | None = None
    validation_fraction: float = 0.01
    max_bytes: int | None = None
    num_workers: int = 0


@dataclass(frozen=True)
class CheckpointSettings:
    """Lightning's ModelCheckpoint. File names hold no `=`, which Hydra's grammar refuses in `resume=...`."""

    _target_: str = "lightning.pytorch.callbacks.ModelCheckpoint"
    dirpath: str | None = None
    filename: str | None = None
    monitor: str | None = None
    mode: str = "min"
    save_last: bool | str | None = None
    save_top_k: int = 1
    save_weights_only: bool = False
    every_n_train_steps: int | None = None
    every_n_epochs: int | None = None
    save_on_train_epoch_end: bool | None = None
    auto_insert_metric_name: bool = False
    enable_version_counter: bool = True
    verbose: bool = False


@dataclass(frozen=True)
class EarlyStoppingSettings:
    """Lightning's EarlyStopping."""

    monitor: str
    _target_: str = "lightning.pytorch.callbacks.EarlyStopping"
    mode: str = "min"
    patience: int = 3
    min_delta: float = 0.0
    check_finite: bool = True
    stopping_threshold: float | None = None
    divergence_threshold: float | None = None
    check_on_train_epoch_end: bool | None = None
    verbose: bool = False


@dataclass(frozen=True)
class LearningRateMonitorSettings:
    """Lightning's LearningRateMonitor."""

    _target_: str = "lightning.pytorch.callbacks.LearningRateMonitor"
    logging_interval: str | None = None
    log_momentum: bool = False
    log_weight_decay: bool = False


@dataclass(frozen=True)
class ThroughputSettings:
    """`hybrid_strategy.callbacks.throughput.Throughput`."""

    _target_: str = "hybrid_strategy.callbacks.throughput.Throughput"
    window_steps: int = 20


@dataclass(frozen=True)
class ProgressSettings:
    """`hybrid_strategy.callbacks.progress.ProgressLine`."""

    _target_: str = "hybrid_strategy.callbacks.progress.ProgressLine"
    refresh_seconds: float = 0.5
    plain_seconds: float = 10.0


@dataclass(frozen=True)
class CsvSettings:
    """Lightning's CSVLogger."""

    _target_: str = "lightning.pytorch.loggers.CSVLogger"
    save_dir: str | None = None
    name: str | None = None
    version: int | str | None = None
    prefix: str = ""
    flush_logs_every_n_steps: int = 100


@dataclass(frozen=True)
class WandbSettings:
    """`hybrid_strategy.reporting.wandb_run.WandbRunLogger`. `mode`: `auto` is online where a key is set, else offline."""

    _target_: str = "hybrid_strategy.reporting.wandb_run.WandbRunLogger"
    project: str = "hybrid-strategy"
    entity: str | None = None
    name: str | None = None
    group: str | None = None
    job_type: str | None = "train"
    notes: str | None = None
    tags: tuple[str, ...] = ()
    id: str | None = None
    mode: str = "auto"
    save_dir: str | None = None
    init_timeout: float = 20.0
    finish_timeout: float = 30.0


@dataclass(frozen=True)
class TensorBoardSettings:
    """Lightning's TensorBoardLogger; the last three are those of its SummaryWriter. Without a save_dir: the run folder."""

    _target_: str = "lightning.pytorch.loggers.TensorBoardLogger"
    save_dir: str | None = None
    name: str | None = ""
    version: int | str | None = "tensorboard"
    log_graph: bool = False
    default_hp_metric: bool = False
    prefix: str = ""
    sub_dir: str | None = None
    purge_step: int | None = None
    max_queue: int = 10
    flush_secs: int = 120


@dataclass(frozen=True)
class MlflowSettings:
    """`hybrid_strategy.reporting.mlflow_run.MlflowRunLogger`."""

    _target_: str = "hybrid_strategy.reporting.mlflow_run.MlflowRunLogger"
    experiment_name: str = "hybrid-strategy"
    run_name: str | None = None
    tracking_uri: str | None = None
    save_dir: str | None = None
    run_dir: str | None = None
    tags: Mapping[str, str] = field(default_factory=dict)
    artifact_location: str | None = None


SHIPPED: tuple[type, ...] = (
    CheckpointSettings,
    EarlyStoppingSettings,
    LearningRateMonitorSettings,
    ThroughputSettings,
    ProgressSettings,
    CsvSettings,
    WandbSettings,
    TensorBoardSettings,
    MlflowSettings,
    LanguageModelSettings,
    TextDataSettings,
)
BY_TARGET: Mapping[str, type] = {kind._target_: kind for kind in SHIPPED}  # type: ignore[attr-defined]


def open_kinds(group: str, values: Mapping[str, Any]) -> dict[str, type]:
    """Dotted path -> the dataclass its keys must come from, for everything typed in an open group."""
    if group == "cluster":
        return {"cluster": ClusterSettings}
    if group in ("callbacks", "logger"):
        entries = {f"{group}.{name}": entry for name, entry in values.items() if isinstance(entry, Mapping)}
    else:
        entries = {group: values}
    found = {path: BY_TARGET.get(str(entry.get("_target_"))) for path, entry in entries.items()}
    return {path: kind for path, kind in found.items() if kind is not None}


def shape_of(config: RunConfig) -> ModelShape | None:
    """The sizes of the model; None where it is the user's own."""
    if config.model.get("_target_") != LANGUAGE_MODEL:
        return None
    return ModelShape(**{each.name: config.model[each.name] for each in fields(ModelShape)})


def sequence_length_of(config: RunConfig) -> int:
    """Tokens of a sample of the language model's: those of the data where it says so, else as many as the model takes."""
    given = config.data.get("sequence_length") if config.data.get("_target_") == TEXT_DATA else None
    return int(config.model["sequence_length"] if given is None else given)


def trained_shape_of(config: RunConfig) -> ModelShape | None:
    """The sizes of the model, with the length of the sequences that it is trained on.

    Positions that are learned keep theirs, since it is a size of their parameters.
    """
    shape = shape_of(config)
    if shape is None or shape.learned_positions:
        return shape
    return replace(shape, sequence_length=sequence_length_of(config))


def global_batch_size_of(config: RunConfig, data_parallel_size: int) -> int | None:
    """Samples of an optimizer step. The user's own data may tell by a key `batch_size`, that of one rank's loader; else None."""
    if config.data.get("_target_") == TEXT_DATA:
        return int(config.data["global_batch_size"])
    rows = config.data.get("batch_size")
    return rows * data_parallel_size * config.trainer.accumulate_grad_batches if isinstance(rows, int) else None


def text_data_arguments(config: RunConfig, batch_size: int) -> dict[str, Any]:
    """The arguments of `TextDataModule`, with what follows from the model and the batch filled in."""
    arguments = {key: value for key, value in config.data.items() if key not in ("_target_", "global_batch_size")}
    for key in ("sequence_length", "vocab_size"):
        if arguments[key] is None:
            arguments[key] = config.model.get(key)
        if arguments[key] is None:  # a model of the user's own that does not say
            del arguments[key]
    return {**arguments, "batch_size": batch_size, "seed": config.seed, "cache_dir": config.paths.cache_dir}


def numerics_of_run(config: RunConfig) -> Numerics:
    """Bytes of a parameter by use: those of the precision and the optimizer, and of gradients as they are told to travel."""
    found = numerics_of(config.precision.mode, config.optimizer.name, config.optimizer.momentum)
    dtype = config.strategy.reduce_dtype
    return found if dtype is None else replace(found, reduce_bytes=REDUCE_DTYPES[dtype])
