"""Every key of a run's configuration with its type and default: frozen, as the rest of the program sees it.

Hydra needs classes that can be changed (`config/door.py` makes them from these); behind the door nothing is.
`model`, `data`, `callbacks`, `logger` and `cluster` are open here: what may stand in them depends on their `_target_`
(`config/targets.py`), so that a module of the user's own can have any key.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hybrid_strategy.spec.cluster import ClusterSpec
from hybrid_strategy.spec.training import LearningRateSpec, OptimizerSpec

STRATEGY_TARGET = "hybrid_strategy.HybridParallelStrategy"

AUTO = "auto"
"""The value of a setting of the layout that the planner decides (`strategy=auto`: all that is not set)."""


@dataclass(frozen=True)
class StrategySettings:
    """The arguments of `HybridParallelStrategy`, by their own names; `auto` leaves one of the layout to the planner."""

    _target_: str = STRATEGY_TARGET
    data_parallel_size: int | str = AUTO
    tensor_parallel_size: int | str = 1
    pipeline_parallel_size: int | str = 1
    context_parallel_size: int | str = 1
    data_parallel_replicate_size: int | str = 1
    sharding: str = "ddp"
    sequence_parallel: bool | str = False
    schedule: str = "1F1B"
    stages_per_rank: int | str | None = None
    num_microbatches: int | str | None = None
    micro_batch_size: int | str | None = None
    stage_cuts: tuple[int, ...] | None = None
    activation_checkpoint: str = "none"
    compile: bool = False
    module: str | None = None
    parallel_plan: Any = None
    process_group_backend: str | None = None
    timeout: float = 1800.0
    seed: int | None = None
    reduce_dtype: str | None = None
    initial_weights: str | None = None
    asynchronous_checkpoint: bool = False
    checkpoint_when_busy: str = "wait"
    checkpoint_error: str = "raise"


@dataclass(frozen=True)
class PrecisionSettings:
    """`mode` is Lightning's `precision`; `float32_matmul` is torch's `set_float32_matmul_precision`."""

    mode: str = "32-true"
    float32_matmul: str = "highest"


@dataclass(frozen=True)
class TrainerSettings:
    """The arguments of Lightning's Trainer that are the user's to set; the others follow from the other groups."""

    accelerator: str = "auto"
    max_epochs: int | None = None
    min_epochs: int | None = None
    max_steps: int = -1
    min_steps: int | None = None
    max_time: str | None = None
    fast_dev_run: int | bool = False
    overfit_batches: int | float = 0.0
    limit_train_batches: int | float | None = None
    limit_val_batches: int | float | None = None
    limit_test_batches: int | float | None = None
    limit_predict_batches: int | float | None = None
    val_check_interval: int | float | None = None
    check_val_every_n_epoch: int | None = 1
    num_sanity_val_steps: int | None = None
    log_every_n_steps: int | None = None
    accumulate_grad_batches: int = 1
    gradient_clip_val: float | None = None
    gradient_clip_algorithm: str | None = None
    deterministic: bool | str | None = None
    benchmark: bool | None = None
    inference_mode: bool = True
    detect_anomaly: bool = False
    profiler: str | None = None
    enable_checkpointing: bool | None = None
    enable_progress_bar: bool | None = None
    enable_model_summary: bool | None = None
    reload_dataloaders_every_n_epochs: int = 0


@dataclass(frozen=True)
class PathSettings:
    """`run_dir` is decided when a run starts: `<output_dir>/<name>/<stamp>`, unless it is given."""

    output_dir: str = "outputs"
    run_dir: str | None = None
    cache_dir: str | None = None


@dataclass(frozen=True)
class ClusterSettings(ClusterSpec):
    """What planning knows of the machines, and the processes to start on them.

    `devices` is the number of processes on each node; `auto`: this machine's GPUs if they are enough for the layout, else as
    many processes as the layout needs.
    """

    name: str = "local"
    devices: int | str = "auto"
    launcher: str = "local"


@dataclass(frozen=True)
class RunConfig:
    """One run. `resume`: a run folder or checkpoint, or `auto` for the newest of this name."""

    name: str = "train"
    seed: int = 1234
    resume: str | None = None
    tags: tuple[str, ...] = ()
    model: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)
    strategy: StrategySettings = field(default_factory=StrategySettings)
    optimizer: OptimizerSpec = field(default_factory=OptimizerSpec)
    learning_rate: LearningRateSpec = field(default_factory=LearningRateSpec)
    precision: PrecisionSettings = field(default_factory=PrecisionSettings)
    trainer: TrainerSettings = field(default_factory=TrainerSettings)
    callbacks: Mapping[str, Any] = field(default_factory=dict)
    logger: Mapping[str, Any] = field(default_factory=dict)
    cluster: ClusterSettings = field(default_factory=ClusterSettings)
    paths: PathSettings = field(default_factory=PathSettings)


GROUPS = (
    "model",
    "data",
    "strategy",
    "optimizer",
    "learning_rate",
    "precision",
    "trainer",
    "callbacks",
    "logger",
    "cluster",
    "experiment",
    "debug",
    "sweeps",
    "paths",
)
OPEN_GROUPS = ("model", "data", "callbacks", "logger", "cluster")
