"""The settings of launchers and sweepers: typed, every unknown key refused by its full name."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar, cast

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hybrid_strategy.config.door import door, from_plain
from hybrid_strategy.config.literal import escape
from hybrid_strategy.config.messages import Shown, explained
from hybrid_strategy.config.secrets import check_settings
from hybrid_strategy.errors import ConfigError, did_you_mean, message

T = TypeVar("T")

OF_THE_SWEEP = ("array", "max_parallel", "wait", "dry_run", "poll_seconds")
"""Settings of launchers that are the command's own; the others may differ from point to point."""

_LEAST = {
    "max_parallel": 1,
    "poll_seconds": 0.01,
    "cpus_per_task": 1,
    "signal_seconds": 1,
    "max_requeues": 0,
    "top": 1,
    "slack": 1,
}
OF_A_RANK = (
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "ROLE_NAME"),
)
"""Variables of a distributed process, which a sweep started inside one would hand on."""
_WHERE_RANKS_MEET = ("MASTER_ADDR", "MASTER_PORT")
"""Those of them that a batch script takes over."""
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_CLOCK = re.compile(r"^(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?$")


@dataclass(frozen=True)
class LocalSettings:
    """Points on this machine, each in a process tree of its own.

    Attributes:
        time: minutes a point may take, or `hh:mm:ss` as in Slurm; null: as long as it needs.
        max_parallel: points at once, as far as cores or GPUs allow; null: GPUs are shared out, on the CPU one after another.
        poll_seconds: time between two looks at the points.
        environment: variables of the points; null: not set there.
    """

    time: str | int | float | None = None
    max_parallel: int | None = None
    poll_seconds: float = 0.2
    environment: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class SlurmSettings:
    """Points as Slurm jobs; nodes, tasks and GPUs follow from each point's layout.

    Attributes:
        partition, account, qos, constraint, reservation: as sbatch names them; null: Slurm's default.
        time: minutes, or `d-hh:mm:ss`.
        cpus_per_task, mem: as sbatch names them; null: Slurm's default.
        gpu_option: how GPUs are asked for; `{n}` is their number on a node. null: none are.
        sbatch: further options of sbatch by name, `true` for a flag.
        srun: further arguments of srun, e.g. `--container-image=...`.
        setup: lines of the script before srun, e.g. `module load cuda`.
        environment: variables of the points; null: not set there.
        python: the interpreter on the nodes; null: this one.
        array: submit points that need the same as one array.
        max_parallel: jobs at once.
        wait: stay until the end; else `hybrid sweep` shows and collects.
        dry_run: print the scripts and submit nothing.
        signal_seconds: time before the limit at which the ranks are told to save.
        max_requeues: how often a point may be put back into the queue.
        poll_seconds: time between two looks at the queue.
    """

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    reservation: str | None = None
    time: str | int | float = 60
    cpus_per_task: int | None = None
    mem: str | None = None
    gpu_option: str | None = "--gpus-per-node={n}"
    sbatch: Mapping[str, Any] = field(default_factory=dict)
    srun: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()
    environment: Mapping[str, Any] = field(default_factory=dict)
    python: str | None = None
    array: bool = True
    max_parallel: int | None = None
    wait: bool = True
    dry_run: bool = False
    signal_seconds: int = 120
    max_requeues: int = 10
    poll_seconds: float = 1.0


@dataclass(frozen=True)
class GridSettings:
    """Which points there are.

    Attributes:
        params: key -> values in Hydra's grammar, e.g. `1,2,4`; the command line wins.
        points: sets of keys that go together, instead of every combination; the command line wins here, too.
    """

    params: Mapping[str, Any] = field(default_factory=dict)
    points: tuple[Any, ...] = ()


@dataclass(frozen=True)
class LayoutsSettings(GridSettings):
    """Which layouts are points.

    Attributes:
        axes: those that are free where nothing is said of them.
        prune: do not run what the planner says cannot fit or cannot win.
        slack: a layout whose forecast is so many times the best one cannot win.
        top: run only so many, the best by forecast; null: all.
    """

    axes: tuple[str, ...] = ("tensor_parallel_size", "pipeline_parallel_size", "sharding")
    prune: bool = True
    slack: float = 1.5
    top: int | None = None


def settings_of(kind: type[T], values: Mapping[str, Any], prefix: str) -> T:
    """The typed settings.

    Args:
        values: plain containers, e.g. of `hydra.launcher`; `_target_` is left out.
        prefix: where they stand in the configuration.

    Raises:
        ConfigError: by full key.
    """
    given = {key: value for key, value in values.items() if key != "_target_"}
    try:
        merged = OmegaConf.merge(OmegaConf.structured(door(cast(type, kind))), OmegaConf.create(escape(given)))
        plain = OmegaConf.to_container(merged, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise explained(error, kind, prefix) from error
    assert isinstance(plain, dict)
    made: T = from_plain(kind, {str(key): value for key, value in plain.items()})
    for name, least in _LEAST.items():
        value = getattr(made, name, None)
        if value is not None and value < least:
            raise ConfigError(message(f"{prefix}.{name}", value, f"it must be {least} or more", "", f"Set {least} or more"))
    for name, value in vars(made).items():
        if value == "":
            raise ConfigError(message(f"{prefix}.{name}", value, "it is empty", "", f"Set a value, or {prefix}.{name}=null"))
    _check_variables(getattr(made, "environment", {}), f"{prefix}.environment", isinstance(made, LocalSettings))
    check_settings(vars(made), prefix)
    return made


def _check_variables(environment: Mapping[str, Any], key: str, local: bool) -> None:
    """Refuses variables that cannot be set, and those that each process is given anew."""
    given = {*OF_A_RANK, "CUDA_VISIBLE_DEVICES"} if local else {*OF_A_RANK} - {*_WHERE_RANKS_MEET}
    for name, value in environment.items():
        rule, advice = "it is no name of a variable", "Set letters, digits and _"
        if _VARIABLE.fullmatch(str(name)) and value is not None and name in given:
            rule, advice = "the launcher gives each process its own", "Leave it out"
            if name == "CUDA_VISIBLE_DEVICES":
                rule, advice = "points get theirs of the GPUs that this command sees", "Set it in the shell of this command"
        elif _VARIABLE.fullmatch(str(name)):
            continue
        raise ConfigError(message(f"{key}.{name}", value, rule, "", advice))


def checked_settings(overrides: Sequence[str]) -> tuple[str, ...]:
    """The overrides of a command line with those of launcher and sweeper as Hydra should get them.

    Keys below `hydra.launcher` and `hydra.sweeper` are Hydra's to it: it would advise a `+` for a typo, and refuse new entries of
    mappings.

    Raises:
        ConfigError: a key that neither of ours has, while no one else's is chosen.
    """
    chosen = dict(each.split("=", 1) for each in overrides if each.startswith(("hydra/launcher=", "hydra/sweeper=")))
    launchers = {"local": (LocalSettings,), "slurm": (SlurmSettings,), None: (LocalSettings, SlurmSettings)}
    sweepers = {"grid": (GridSettings,), "layouts": (LayoutsSettings,), None: (LayoutsSettings,)}
    kinds = {
        "hydra.launcher": launchers.get(chosen.get("hydra/launcher"), ()),
        "hydra.sweeper": sweepers.get(chosen.get("hydra/sweeper"), ()),
    }
    return tuple(_checked_setting(each, kinds) for each in overrides)


def _checked_setting(text: str, kinds: Mapping[str, tuple[type, ...]]) -> str:
    key, _, value = text.lstrip("+").partition("=")
    prefix = ".".join(key.split(".")[:2])
    if key == prefix or not kinds.get(prefix):
        return text
    name, known = key.split(".")[2], [each.name for kind in kinds[prefix] for each in fields(kind)]
    if name not in known:
        advice = did_you_mean(name, dict.fromkeys(known))
        raise ConfigError(message(f"{prefix}.{name}", Shown(value), "there is no such key", "", advice))
    return f"++{text.lstrip('+')}"


def seconds_of(time: str | int | float | None, key: str) -> float | None:
    """Minutes as a number, or Slurm's forms `mm`, `mm:ss`, `hh:mm:ss`, `d-hh`, `d-hh:mm`, `d-hh:mm:ss`.

    >>> seconds_of(90, "t"), seconds_of("1:30:00", "t"), seconds_of("2-12", "t"), seconds_of("1:30", "t"), seconds_of(None, "t")
    (5400.0, 5400.0, 216000.0, 90.0, None)
    """
    if time is None:
        return None
    seconds = float(time) * 60 if isinstance(time, (int, float)) else _clock_seconds(str(time))
    if not 0 < seconds < math.inf:
        raise ConfigError(message(key, time, "it is minutes, or d-hh:mm:ss", "", "Set 60 or 1:00:00"))
    return seconds


def _clock_seconds(text: str) -> float:
    """0 where it is no time."""
    found = _CLOCK.match(text)
    if found is None:
        return 0.0
    days, *rest = (int(each) if each else None for each in found.groups())
    first, second, third = (each or 0 for each in rest)
    if days is not None:
        return float(days * 86400 + first * 3600 + second * 60 + third)
    if rest[2] is not None:
        return float(first * 3600 + second * 60 + third)
    return float(first * 60 + second)
