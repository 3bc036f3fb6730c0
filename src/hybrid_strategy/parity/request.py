"""What is compared: one module, one set of samples, a layout. Checked here, before any process is started."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hybrid_strategy.errors import ConfigError, did_you_mean, message
from hybrid_strategy.spec.layout import Layout
from hybrid_strategy.strategy.hybrid import HybridParallelStrategy
from hybrid_strategy.strategy.options import Options

Strategy = HybridParallelStrategy | Mapping[str, Any] | None

_OWNED = ("strategy", "devices", "num_nodes", "accelerator", "callbacks", "logger", "fast_dev_run", "max_time")
_QUIET = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
    "limit_val_batches": 0,
    "use_distributed_sampler": False,
}


@dataclass(frozen=True)
class ParityOptions:
    """How a check is run.

    Attributes:
        trainer: arguments of Lightning's Trainer that both runs get, e.g. `precision`, `gradient_clip_val`,
            `accumulate_grad_batches`.
        seed: of weights and of the order of samples, as `seed_everything` would set it.
        accelerator: `cpu`, `cuda`, or `auto`: CUDA where there are devices for all processes.
        timeout_seconds: after which a run that has not ended is a failure.
        float32_matmul: torch's `set_float32_matmul_precision`.
    """

    trainer: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    accelerator: str = "auto"
    timeout_seconds: float = 600.0
    float32_matmul: str = "highest"


@dataclass(frozen=True)
class ParityRequest:
    """Everything that the processes of both runs need; it must be picklable.

    Attributes:
        module: makes the LightningModule, or is one.
        data: makes the LightningDataModule or the training DataLoader, or is one; `None`: the module has its own.
        strategy: arguments of `HybridParallelStrategy`.
        world_size: processes of the layout.
        steps: optimizer steps to compare.
    """

    module: Any
    data: Any = None
    strategy: Mapping[str, Any] = field(default_factory=dict)
    world_size: int = 1
    steps: int = 3
    options: ParityOptions = field(default_factory=ParityOptions)

    @property
    def layout(self) -> Layout:
        """The layout of the run to compare.

        Raises:
            ConfigError: it cannot be honoured.
        """
        return HybridParallelStrategy(**self.strategy).options.layout(self.world_size)

    @property
    def precision(self) -> str:
        return str(self.options.trainer.get("precision") or "32-true")

    @property
    def accumulate(self) -> int:
        return int(self.options.trainer.get("accumulate_grad_batches", 1))


def make_request(
    module: Any, data: Any, strategy: Strategy, steps: int, devices: int | None, options: ParityOptions | None
) -> ParityRequest:
    """A request whose layout is known to be possible.

    Raises:
        ConfigError: settings that cannot be honoured, or that both runs cannot share.
    """
    arguments = strategy_arguments(strategy)
    options = options or ParityOptions()
    if not isinstance(steps, int) or steps < 1:
        raise ConfigError(message("steps", steps, "it must be a whole number of 1 or more", "", "Set 3"))
    _check_trainer(options.trainer)
    request = ParityRequest(module, data, arguments, devices or _processes(arguments), steps, options)
    _ = request.layout
    return request


def strategy_arguments(strategy: Strategy) -> dict[str, Any]:
    """The arguments that make a strategy anew in every process."""
    if isinstance(strategy, HybridParallelStrategy):
        return dict(vars(strategy.options))
    known = Options.__dataclass_fields__
    for key, value in (strategy or {}).items():
        if key not in known:
            raise ConfigError(message(f"strategy.{key}", value, "there is no such argument", "", did_you_mean(key, known)))
    return dict(strategy or {})


def trainer_arguments(request: ParityRequest) -> dict[str, Any]:
    """The Trainer's arguments that both runs share. The number of steps stays the user's, for it shapes learning rates."""
    given = {key: value for key, value in request.options.trainer.items() if value is not None}
    limits = {} if {"max_steps", "max_epochs"} & given.keys() else {"max_steps": request.steps}
    return {**given, **limits, **_QUIET}


def _processes(arguments: Mapping[str, Any]) -> int:
    """The product of the sizes that are numbers: where the data-parallel size is what is left, one copy is enough."""
    sizes = [value for key in _sizes() if isinstance(value := arguments.get(key, 1), int)]
    return math.prod(max(size, 1) for size in sizes)


def _sizes() -> list[str]:
    names = Options.__dataclass_fields__
    return [name for name in names if name.endswith("_parallel_size")]


def _check_trainer(given: Mapping[str, Any]) -> None:
    for key in _OWNED:
        if given.get(key) not in (None, False):
            rule = "both runs get it from the check itself"
            raise ConfigError(message(f"trainer.{key}", given[key], rule, "", "Leave it out"))
    for key in ("max_steps", "max_epochs", "limit_train_batches"):
        if given.get(key) == 0:
            rule = "a check compares steps, and none would run"
            raise ConfigError(message(f"trainer.{key}", given[key], rule, "", "Set 1 or more, or leave it out"))


def made(source: Any, kind: type | tuple[type, ...], key: str) -> Any:
    """The object that `source` is or makes.

    Raises:
        ConfigError: it is something else.
    """
    value = source() if isinstance(source, Callable) and not isinstance(source, kind) else source  # type: ignore[arg-type]
    if not isinstance(value, kind):
        kinds = [each.__name__ for each in (kind if isinstance(kind, tuple) else (kind,))]
        rule = f"it must be, or return, a {' or a '.join(kinds)}"
        raise ConfigError(message(key, type(value).__name__, rule, "", "Give the class, or a function without arguments"))
    return value
