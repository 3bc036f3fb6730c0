"""A run folder's `config.yaml`: resolved once by the parent, read unchanged by every rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from hybrid_strategy.config.literal import escape
from hybrid_strategy.config.schema import from_values
from hybrid_strategy.config.settings import RunConfig
from hybrid_strategy.files import write_text

CONFIG_FILE = "config.yaml"
PLAN_FILE = "plan.json"
RESULT_FILE = "result.json"
PREEMPTED_FILE = "preempted.json"
"""Written by the first rank when a signal has ended the run, after what there was to save has been saved."""


def as_values(config: RunConfig) -> dict[str, Any]:
    """The configuration as nested plain containers."""
    values: dict[str, Any] = _lists(asdict(config))
    return values


def write_config(config: RunConfig, run_dir: Path) -> Path:
    """Writes `config.yaml`; text that looks like an interpolation is escaped, so that reading it resolves nothing."""
    path = run_dir / CONFIG_FILE
    write_text(path, yaml_of(config))
    return path


def yaml_of(config: RunConfig) -> str:
    """The text of `config.yaml`."""
    return OmegaConf.to_yaml(OmegaConf.create(escape(as_values(config))))


def read_config(run_dir: Path) -> RunConfig:
    """The configuration that `write_config` wrote."""
    values = OmegaConf.to_container(OmegaConf.load(run_dir / CONFIG_FILE), resolve=True)
    return from_values({str(key): value for key, value in values.items()})  # type: ignore[union-attr]


def moved(config: RunConfig, before: str, folder: str) -> RunConfig:
    """The configuration with its run folder elsewhere: every text that holds `before` holds `folder` instead."""

    def move(value: Any) -> Any:
        if isinstance(value, str):
            return value.replace(before, folder)
        if isinstance(value, Mapping):
            return {key: move(each) for key, each in value.items()}
        return type(value)(map(move, value)) if isinstance(value, (list, tuple)) else value

    values = {each.name: getattr(config, each.name) for each in fields(config)}
    texts = {name: move(value) for name, value in values.items() if isinstance(value, (str, Mapping, tuple))}
    return replace(config, **texts, paths=replace(config.paths, **move(vars(config.paths))))


def _lists(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _lists(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_lists(each) for each in value]
    return value
