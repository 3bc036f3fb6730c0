"""From the configuration to the objects of a run: what a worker process needs, and nothing that starts one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from hydra.errors import InstantiationException
from hydra.utils import instantiate

from hybrid_strategy.config.literal import escape
from hybrid_strategy.config.plan import RunPlan
from hybrid_strategy.config.settings import RunConfig, StrategySettings
from hybrid_strategy.config.targets import TEXT_DATA, shape_of, text_data_arguments
from hybrid_strategy.errors import ConfigError, HybridError, message

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from hybrid_strategy.strategy.hybrid import HybridParallelStrategy


def make(values: Mapping[str, Any], key: str) -> Any:
    """The object that a mapping with `_target_` describes.

    Raises:
        ConfigError: there is no such class, or it does not take these arguments.
    """
    try:
        return instantiate(escape(values), _convert_="all")
    except InstantiationException as error:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        if isinstance(cause, HybridError):
            raise cause from error
        if isinstance(cause, (ImportError, AttributeError, TypeError)):
            rule = "it cannot be made"
            raise ConfigError(message(f"{key}._target_", values.get("_target_"), rule, str(cause), "")) from error
        raise


def build_module(config: RunConfig, planned: RunPlan) -> pl.LightningModule:
    """The LightningModule: the language model of the configuration, or the user's own."""
    shape = shape_of(config)
    if shape is None:
        module: pl.LightningModule = make(config.model, "model")
        return module
    from hybrid_strategy.modules.language_model import LanguageModel

    peak = planned.plan.learning_rate
    optimizer = config.optimizer if peak is None else replace(config.optimizer, learning_rate=peak)
    return LanguageModel(shape, optimizer, config.learning_rate, config.model.get("options"))


def build_data(config: RunConfig, planned: RunPlan) -> pl.LightningDataModule:
    """The LightningDataModule; its loaders yield what one data-parallel rank consumes in one step."""
    if config.data.get("_target_") != TEXT_DATA:
        data: pl.LightningDataModule = make(config.data, "data")
        return data
    from hybrid_strategy.modules.text_data import TextDataModule

    rows = planned.plan.batch.rank_batch_size(planned.plan.layout.data_parallel_size)
    return TextDataModule(**text_data_arguments(config, rows))


def build_strategy(config: RunConfig) -> HybridParallelStrategy:
    """The strategy, in processes that a launcher has started."""
    from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment

    from hybrid_strategy.strategy.hybrid import HybridParallelStrategy

    arguments = {each.name: getattr(config.strategy, each.name) for each in fields(StrategySettings)}
    del arguments["_target_"]
    if arguments["seed"] is None:
        arguments["seed"] = config.seed
    return HybridParallelStrategy(**arguments, cluster_environment=TorchElasticEnvironment())


def build_trainer(config: RunConfig, planned: RunPlan, callbacks: list[Any], loggers: list[Any]) -> pl.Trainer:
    """The Trainer on the devices of the plan."""
    import lightning.pytorch as pl

    world = planned.world
    given = {name: value for name, value in vars(config.trainer).items() if value is not None}
    return pl.Trainer(
        **given
        | {
            "accelerator": world.accelerator,
            "devices": world.devices,
            "num_nodes": world.num_nodes,
            "strategy": build_strategy(config),
            "precision": config.precision.mode,
            "callbacks": callbacks,
            "logger": loggers or False,
            "default_root_dir": config.paths.run_dir,
            "use_distributed_sampler": False,
        }
    )


def build_all(entries: Mapping[str, Any], group: str) -> dict[str, Any]:
    """The callbacks or loggers by the names of their entries; entries that are null are left out."""
    return {name: make(values, f"{group}.{name}") for name, values in entries.items() if values is not None}
