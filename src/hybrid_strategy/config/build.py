"""From the configuration to the objects of a run: what a worker process needs, and nothing that starts one."""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Mapping
from dataclasses import fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from hybrid_strategy.config.plan import RunPlan
from hybrid_strategy.config.secrets import read_variables
from hybrid_strategy.config.settings import RunConfig, StrategySettings
from hybrid_strategy.config.target_arguments import HYDRA_WORDS
from hybrid_strategy.config.targets import TEXT_DATA, sequence_length_of, shape_of, text_data_arguments
from hybrid_strategy.errors import ConfigError, message
from hybrid_strategy.planning.learning_rate import warmup_steps

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from hybrid_strategy.strategy.hybrid import HybridParallelStrategy

T = TypeVar("T")

_NULL_IS_A_VALUE = ("check_val_every_n_epoch",)
"""Of the Trainer's arguments: validation is counted in batches over all epochs. Elsewhere null stands for Lightning's default."""


def make(values: Mapping[str, Any], key: str) -> Any:
    """The object that a mapping with `_target_` describes, in Hydra's words: `_args_`, `_partial_`, nested objects.

    Hydra's own `instantiate` would resolve the values once more, which have been resolved.

    Raises:
        ConfigError: there is no such class, or it does not take these arguments.
    """
    target = str(values["_target_"])
    arguments = {name: _made(value, f"{key}.{name}") for name, value in values.items() if name not in HYDRA_WORDS}
    positional = [_made(value, f"{key}._args_") for value in values.get("_args_", ())]
    try:
        function = pkgutil.resolve_name(target)
    except (ImportError, AttributeError, ValueError) as error:
        raise _cannot_be_made(key, target, error) from error
    if values.get("_partial_", False):
        return partial(function, *positional, **arguments)
    try:
        inspect.signature(function).bind(*positional, **arguments)
    except TypeError as error:
        raise _cannot_be_made(key, target, error) from error
    except ValueError:  # a built-in does not tell its arguments: it is called and finds out itself
        return function(*positional, **arguments)
    return function(*positional, **arguments)


def _made(value: Any, key: str) -> Any:
    if isinstance(value, Mapping):
        return make(value, key) if "_target_" in value else {name: _made(each, f"{key}.{name}") for name, each in value.items()}
    if isinstance(value, str):
        return read_variables(value, key)
    if isinstance(value, (list, tuple)):
        return [_made(each, f"{key}[{index}]") for index, each in enumerate(value)]
    return value


def _cannot_be_made(key: str, target: str, error: Exception) -> ConfigError:
    return ConfigError(message(f"{key}._target_", target, "it cannot be made", str(error), ""))


def _of_kind(made: Any, group: str, values: Mapping[str, Any], kind: type[T]) -> T:
    found: T = made
    if not isinstance(getattr(made, "_orig_mod", made), kind):  # torch.compile holds the module there
        rule, numbers = f"it must make a {kind.__name__} of lightning.pytorch", f"It makes an object of {type(made).__qualname__}"
        raise ConfigError(message(f"{group}._target_", str(values["_target_"]), rule, numbers, f"Set a class of {kind.__name__}"))
    return found


def build_module(config: RunConfig, planned: RunPlan) -> pl.LightningModule:
    """The LightningModule: the language model of the configuration, or the user's own."""
    shape = shape_of(config)
    if shape is None:
        from lightning.pytorch import LightningModule

        return _of_kind(make(config.model, "model"), "model", config.model, LightningModule)
    from hybrid_strategy.modules.language_model import LanguageModel

    peak = planned.plan.learning_rate
    optimizer = config.optimizer if peak is None else replace(config.optimizer, learning_rate=peak)
    tokens = planned.plan.batch.global_batch_size * sequence_length_of(config)
    warmed = config.learning_rate
    if warmed.warmup_tokens:
        warmed = replace(warmed, warmup_steps=warmup_steps(warmed, tokens), warmup_tokens=0)
    return LanguageModel(shape, optimizer, warmed, config.model.get("options"))


def build_data(config: RunConfig, planned: RunPlan) -> pl.LightningDataModule:
    """The LightningDataModule; its loaders yield what one data-parallel rank consumes in one step."""
    if config.data.get("_target_") != TEXT_DATA:
        from lightning.pytorch import LightningDataModule

        return _of_kind(make(config.data, "data"), "data", config.data, LightningDataModule)
    from hybrid_strategy.modules.text_data import TextDataModule

    rows = planned.plan.batch.rank_batch_size(planned.plan.layout.data_parallel_size)
    return TextDataModule(**text_data_arguments(config, rows))


def build_strategy(config: RunConfig, planned: RunPlan) -> HybridParallelStrategy:
    """The strategy, in processes that a launcher has started."""
    from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment

    from hybrid_strategy.strategy.hybrid import HybridParallelStrategy

    arguments = {each.name: getattr(planned.strategy, each.name) for each in fields(StrategySettings)}
    del arguments["_target_"]
    if arguments["seed"] is None:
        arguments["seed"] = config.seed
    return HybridParallelStrategy(**arguments, cluster_environment=TorchElasticEnvironment())


def build_trainer(config: RunConfig, planned: RunPlan, callbacks: list[Any], loggers: list[Any]) -> pl.Trainer:
    """The Trainer on the devices of the plan."""
    import lightning.pytorch as pl

    world = planned.world
    given = {name: value for name, value in vars(config.trainer).items() if value is not None or name in _NULL_IS_A_VALUE}
    return pl.Trainer(
        **given
        | {
            "accelerator": world.accelerator,
            "devices": world.devices,
            "num_nodes": world.num_nodes,
            "strategy": build_strategy(config, planned),
            "precision": config.precision.mode,
            "callbacks": callbacks,
            "logger": loggers or False,
            "default_root_dir": config.paths.run_dir,
            "use_distributed_sampler": False,
            "profiler": _profiler(config),
        }
    )


def _profiler(config: RunConfig) -> Any:
    """Lightning's profiler, with its report in the run folder instead of between the lines of the terminal."""
    from lightning.pytorch import profilers

    kinds = {"simple": profilers.SimpleProfiler, "advanced": profilers.AdvancedProfiler, "pytorch": profilers.PyTorchProfiler}
    if config.trainer.profiler is None:
        return None
    return kinds[config.trainer.profiler](dirpath=config.paths.run_dir, filename="profile")


def build_all(entries: Mapping[str, Any], group: str) -> dict[str, Any]:
    """The callbacks or loggers by the names of their entries; entries that are null are left out."""
    return {name: make(values, f"{group}.{name}") for name, values in entries.items() if values is not None}
