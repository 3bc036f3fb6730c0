"""What the parts of one sweep share: Hydra makes the sweeper and the launcher apart from each other and from the command."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from hybrid_strategy.errors import ConfigError, HybridError, message
from hybrid_strategy.sweeping.layouts import Skipped
from hybrid_strategy.sweeping.points import Point

Key = frozenset[str]
"""The overrides of a point, whatever their order."""


@dataclass
class Session:
    """One sweep of one command.

    Attributes:
        console: where the user reads.
        command: how the user called it, for what is printed and kept.
        single: the command runs one point and its folder is the run folder, e.g. `hybrid train hydra/launcher=slurm`.
        target: what every rank of a point calls, `package.module:function`.
        entry: the command that runs a prepared point, without its folder.
        common: overrides that every point has, besides those of the command line.
        skipped: points that are not run, by the sweeper or by the launcher.
        forecasts: what the sweeper knows of a point.
        points: those that were run or taken over, in order.
        folder: of the sweep, once it is known.
        error: what ended the sweep; Hydra would print it its own way.
        detached: jobs go on after the command has ended.
        ran: how many points this command had to run.
        failed: what failed points said that a launcher of others has run.
    """

    console: Console
    command: str = ""
    single: bool = False
    target: str = ""
    entry: tuple[str, ...] = ()
    common: set[str] = field(default_factory=set)
    skipped: list[Skipped] = field(default_factory=list)
    forecasts: dict[Key, Mapping[str, Any]] = field(default_factory=dict)
    points: list[Point] = field(default_factory=list)
    folder: Path | None = None
    error: HybridError | None = None
    detached: bool = False
    ran: int = 0
    failed: list[str] = field(default_factory=list)


_SESSIONS: weakref.WeakKeyDictionary[Callable[..., Any], Session] = weakref.WeakKeyDictionary()


def attach(task_function: Callable[..., Any], session: Session) -> None:
    """Makes the session known to the sweeper and the launcher that Hydra makes for this task function."""
    _SESSIONS[task_function] = session


def session_of(task_function: Callable[..., Any], plugin: str) -> Session:
    """The session of this command.

    Raises:
        ConfigError: another application than `hybrid train` uses the plug-in.
    """
    session = _SESSIONS.get(task_function)
    if session is None:
        rule = "it runs the points of `hybrid train`, whose configuration tells what a point needs"
        raise ConfigError(message("hydra/launcher or hydra/sweeper", plugin, rule, "", "Set basic, or use `hybrid train -m`"))
    return session


def key_of(overrides: Sequence[str]) -> Key:
    """What a point is found by."""
    return frozenset(each.lstrip("+") for each in overrides)
