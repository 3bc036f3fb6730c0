"""From the command line's overrides to a composed configuration."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, read_write

from hybrid_strategy.config.folders import shipped_folder
from hybrid_strategy.config.messages import HYDRA_ERRORS, explained
from hybrid_strategy.config.overrides import check_nothing_ignored, checked
from hybrid_strategy.config.schema import read, register
from hybrid_strategy.config.secrets import check_hydra
from hybrid_strategy.config.settings import RunConfig
from hybrid_strategy.errors import ConfigError, message

CONFIG_NAME = "train"
VERSION_BASE = "1.3"


@dataclass(frozen=True)
class Source:
    """Where a configuration comes from.

    Attributes:
        overrides: in Hydra's grammar.
        config_dir: a folder of the user's own whose options are found beside the shipped ones.
        config_name: the primary configuration.
    """

    overrides: tuple[str, ...] = ()
    config_dir: str | None = None
    config_name: str = CONFIG_NAME


def compose(source: Source) -> DictConfig:
    """What Hydra composes of the shipped groups, the user's folder and the overrides; `hydra` is in it, as in a run.

    Raises:
        ConfigError: an override or a file is wrong.
    """
    register()
    accepted = checked(source.overrides)
    if source.config_dir is not None and not os.path.isdir(source.config_dir):
        raise ConfigError(message("--config-dir", source.config_dir, "there is no such folder", "", "Set one that exists"))
    try:
        with initialize_config_dir(str(shipped_folder("conf")), version_base=VERSION_BASE):
            if source.config_dir is not None:
                _search(os.path.abspath(source.config_dir))
            config = hydra_compose(source.config_name, overrides=accepted, return_hydra_config=True)
    except HYDRA_ERRORS as error:
        given = dict(text.lstrip("+").partition("=")[::2] for text in source.overrides)
        raise explained(error, given=given) from error
    finally:
        GlobalHydra.instance().clear()
    check_hydra(config)
    return config


def _search(folder: str) -> None:
    """The folder's place is the one that Hydra's own command line gives it; `hydra.searchpath` would hide its primary files."""
    loader: Any = GlobalHydra.instance().config_loader()
    places = loader.get_search_path()
    places.prepend(provider="command-line", path=f"file://{folder}", anchor=SearchPathQuery(provider="schema"))
    loader.repository.initialize_sources(places)


def run_config(source: Source) -> RunConfig:
    """The frozen configuration as a run of it would have it; the run folder is only named, not made.

    Raises:
        ConfigError: something in it is wrong.
    """
    return read_composed(compose(source), source)


def read_composed(config: DictConfig, source: Source) -> RunConfig:
    """The same of what was composed of the source already."""
    check_nothing_ignored(source.overrides, config.model)
    HydraConfig.instance().set_config(config)
    try:
        run_dir = os.path.abspath(config.hydra.run.dir)
        with read_write(config.hydra.runtime):
            config.hydra.runtime.output_dir = run_dir
        HydraConfig.instance().set_config(config)  # it keeps a copy
        return read(config, run_dir)
    except HYDRA_ERRORS as error:
        raise explained(error) from error
    finally:
        HydraConfig.instance().cfg = None
