"""A point of a sweep: one run in a folder of its own, with all that is needed to start it again."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from hybrid_strategy.config.plan import RunPlan
from hybrid_strategy.config.settings import RunConfig
from hybrid_strategy.config.storage import CONFIG_FILE, PLAN_FILE, as_values, write_config
from hybrid_strategy.files import read_json, write_json

POINT_FILE = "point.json"
_FLAGS = ("--config-dir", "--config-name")
_LAUNCHER = ("hydra/launcher=", "hydra.launcher.")
_SEARCHED = "hydra.searchpath="


@dataclass(frozen=True)
class Resources:
    """What a point needs of the machines: `nodes` x `tasks_per_node` processes, with a GPU each where `gpus`."""

    nodes: int = 1
    tasks_per_node: int = 1
    gpus: bool = False

    @property
    def world_size(self) -> int:
        return self.nodes * self.tasks_per_node


@dataclass(frozen=True)
class Point:
    """What a sweep knows of a point without composing it again.

    Attributes:
        name: of its folder below that of the sweep.
        folder: the run folder, absolute.
        overrides: of the point, in Hydra's grammar.
        swept: key -> value as it was written, for the keys that vary.
        tags: what varies, in short words.
        resources: of its processes.
        facts: plain values for tables: layout, batch, forecast.
        digest: of the whole configuration, without the folder it runs in.
        wandb_id: the same for every attempt.
        start: checkpoint that an attempt goes on from while the point has none of its own.
        launcher: settings of the launcher, resolved for this point.
        idle: defaults of the keys among its overrides that do nothing here, and count at other points.
    """

    name: str
    folder: Path
    overrides: tuple[str, ...]
    swept: Mapping[str, str]
    tags: tuple[str, ...]
    resources: Resources
    facts: Mapping[str, Any]
    digest: str
    wandb_id: str = ""
    start: str | None = None
    launcher: Mapping[str, Any] = field(default_factory=dict)
    idle: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain data; the folder is where the file lies."""
        values = dict(vars(self))
        del values["folder"]
        return {**values, "resources": vars(self.resources)}


def command_of(point: Point, command: str = "") -> str:
    """What runs this point alone, ready to paste.

    Where the sweep is a file the rest of what it says comes with it, as a sweep of one point: the command line wins over files.

    Args:
        command: what started the sweep: where its configurations are, and what runs its points where this machine does not.
    """
    typed = shlex.split(command)
    idle = {each.partition("=")[0]: each for each in point.idle}  # a single run refuses what does nothing
    meant = [idle.get(each.lstrip("+").partition("=")[0], each) for each in point.overrides]
    words = [each for each in meant if not each.lstrip("+").startswith(("hydra.", "name="))]
    from_file = any(each.startswith("sweeps=") for each in words)
    elsewhere = any(each.startswith(_LAUNCHER[0]) and not each.endswith("=local") for each in typed)
    kept = (_SEARCHED, *(_LAUNCHER if from_file or elsewhere else ()))
    settings = {each.partition("=")[0]: each for each in (*typed, *point.overrides) if each.lstrip("+").startswith(kept)}
    if from_file and "hydra/sweeper=basic" not in typed:
        settings["points"] = "hydra.sweeper.points=[]"  # the file's sets of keys, of which this point is one
    flags = [word for flag in _FLAGS if flag in typed for word in (flag, typed[typed.index(flag) + 1])]
    start = ["hybrid", "train", *(["-m"] if from_file else []), *map(shlex.quote, flags)]
    return " ".join([*start, *map(shlex.quote, (*words, *settings.values())), f"name={point.name}"])


def read_point(folder: Path) -> Point | None:
    """The point of a folder that was prepared; None where there is none, or not a whole one."""
    values = read_json(folder / POINT_FILE)
    if values is None:
        return None
    try:
        resources = Resources(**values.pop("resources"))
        for key in ("overrides", "tags"):
            values[key] = tuple(values[key])
        values["idle"] = tuple(values.get("idle", ()))
        return Point(folder=folder, resources=resources, **values)
    except (KeyError, TypeError):
        return None


def write_point(point: Point, config: RunConfig, planned: RunPlan) -> None:
    """Leaves everything in the point's folder that a process needs to run it."""
    point.folder.mkdir(parents=True, exist_ok=True)
    write_config(replace(config, strategy=planned.strategy), point.folder)
    write_json(point.folder / PLAN_FILE, planned.to_dict())
    write_json(point.folder / POINT_FILE, point.to_dict())


def digest_of(config: RunConfig, folder: Path) -> str:
    """Equal for two points that would run the same thing, wherever they run and whatever they are called in W&B."""
    values = _compared(config)
    text = json.dumps(values, sort_keys=True, default=str).replace(json.dumps(str(folder))[1:-1], "<folder>")
    return sha256(text.encode()).hexdigest()[:16]


def differences(folder: Path, config: RunConfig) -> list[str]:
    """What is another than in the folder of an earlier run, by key: `optimizer.weight_decay 0.1, now 0.3`."""
    path = folder / CONFIG_FILE
    found = OmegaConf.to_container(OmegaConf.load(path)) if path.is_file() else {}
    now = _compared(config)
    old, new = _flat({key: found.get(key) for key in now} if isinstance(found, dict) else {}), _flat(now)
    keys = [key for key in dict.fromkeys((*old, *new)) if old.get(key) != new.get(key)]
    return [f"{key} {old.get(key)}, now {new.get(key)}" for key in keys]


def _compared(config: RunConfig) -> dict[str, Any]:
    """What makes two points the same run."""
    unlike = ("name", "tags", "logger", "paths", *(("resume",) if config.resume is None else ()))
    return {key: value for key, value in as_values(config).items() if key not in unlike}


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return found
