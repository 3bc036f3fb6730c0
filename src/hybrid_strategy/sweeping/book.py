"""The folder of a sweep: which points it has, how each stands, what was skipped."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hybrid_strategy.config.storage import CONFIG_FILE, RESULT_FILE
from hybrid_strategy.errors import ConfigError, message
from hybrid_strategy.files import read_json, write_json
from hybrid_strategy.sweeping import states
from hybrid_strategy.sweeping.attempts import State, read_state, write_state
from hybrid_strategy.sweeping.layouts import Skipped
from hybrid_strategy.sweeping.points import Point, differences, read_point, write_point
from hybrid_strategy.sweeping.prepare import Ready

SWEEP_FILE = "sweep.json"

_SHOWN = 3
"""So many changed keys are told of."""

LOST = "lost"
_LOST_REASON = "its folder is not there any more, or not whole; the command that started the sweep makes it anew"


@dataclass(frozen=True)
class Book:
    """What a sweep's folder holds.

    Attributes:
        folder: of the sweep.
        points: in the order of the sweep.
        skipped: points that are not run, with reasons; those whose folder is gone, too.
        settings: what else `sweep.json` says: command, launcher, target.
    """

    folder: Path
    points: tuple[Point, ...]
    skipped: tuple[Skipped, ...]
    settings: Mapping[str, Any]

    @property
    def name(self) -> str:
        return self.folder.name


def open_book(folder: Path) -> Book:
    """Reads the folder of a sweep.

    Raises:
        ConfigError: there is no sweep.
    """
    values = read_json(folder / SWEEP_FILE)
    if values is None or not {"points", "skipped", "target"} <= values.keys():
        known = sorted(each.parent.name for each in folder.parent.glob(f"*/{SWEEP_FILE}")) if folder.parent.is_dir() else []
        advice = f"Known here: {', '.join(known)}" if known else "Set the folder of a sweep, or its name and --output-dir"
        numbers = f"{SWEEP_FILE} cannot be read" if (folder / SWEEP_FILE).exists() else ""
        raise ConfigError(message("NAME", str(folder), "there is no sweep of this name", numbers, advice))
    found = {name: _there(folder / name if name else folder) for name in values.pop("points")}
    skipped = [Skipped(**each) for each in values.pop("skipped")]
    lost = [Skipped(name, LOST, _LOST_REASON) for name, point in found.items() if point is None]
    return Book(folder, tuple(point for point in found.values() if point is not None), (*skipped, *lost), values)


def _there(folder: Path) -> Point | None:
    """A point that is finished or can be run."""
    point = read_point(folder)
    return point if point is not None and (finished(point) or (folder / CONFIG_FILE).is_file()) else None


def keep(book: Book) -> None:
    """Writes `sweep.json`."""
    names = [each.folder.name if each.folder != book.folder else "" for each in book.points]
    skipped = [vars(each) for each in book.skipped]
    write_json(book.folder / SWEEP_FILE, {**book.settings, "points": names, "skipped": skipped})


def enter(ready: Sequence[Ready], alive: Callable[[Point], bool], say: Callable[[str], None]) -> list[Point]:
    """Writes the folders of the points. What is finished or alive is left as it is; where the configuration is another one, the
    earlier run is set aside, and the user is told.

    Args:
        alive: is a job of this point waiting or running?
        say: shows a line to the user.

    Raises:
        ConfigError: a point of another configuration is alive under this name.
    """
    points = []
    for each in ready:
        point, old = each.point, read_point(each.point.folder)
        if old is not None and alive(old):
            _check_same(old, point)
            points.append(old)
            continue
        if old is not None and old.digest == point.digest:
            point = replace(point, wandb_id=old.wandb_id or point.wandb_id)
            each = Ready(point, _same_run(each, point.wandb_id), each.planned)
            if read_state(point.folder).state == states.OK and (point.folder / RESULT_FILE).exists():
                points.append(point)
                continue
        elif old is not None:
            say(_set_aside(each))
        write_point(point, each.config, each.planned)
        if read_state(point.folder).state != states.PENDING:
            write_state(point.folder, replace(read_state(point.folder), state=states.PENDING, reason=""))
        points.append(point)
    return points


def _check_same(old: Point, point: Point) -> None:
    if old.digest != point.digest:
        rule = "a job of another configuration is alive under this name"
        advice = f"Wait for it, cancel it with `hybrid sweep cancel {old.folder.parent}`, or give the sweep another name"
        raise ConfigError(message("name", point.name, rule, f"It is job {state_of(old).job}", advice))


def _same_run(ready: Ready, wandb_id: str) -> Any:
    """An attempt more of the same point is the same W&B run."""
    loggers = {
        name: {**entry, "id": wandb_id} if isinstance(entry, Mapping) and entry.get("id") == ready.point.wandb_id else entry
        for name, entry in ready.config.logger.items()
    }
    return replace(ready.config, logger=loggers)


def others(folder: Path, names: Set[str], alive: Callable[[Point], bool], say: Callable[[str], None]) -> list[Point]:
    """Points that an earlier command left in the folder of this sweep and that this one does not have.

    The user is told of them. Returns those that are alive: nobody would watch or cancel them any more.

    Args:
        names: of the points of this command.
        alive, say: as of `enter`.
    """
    if read_json(folder / SWEEP_FILE) is None:
        return []
    earlier = [each for each in open_book(folder).points if each.name not in names and each.folder != folder]
    kept = [each for each in earlier if alive(each)]
    left = ", ".join(each.name for each in earlier if each not in kept)
    if kept:
        say(f"of an earlier command, and still alive: {', '.join(each.name for each in kept)}; shown with the others")
    if left:
        say(f"of an earlier command, and no part of this one: {left}; their folders stay as they are")
    return kept


def _set_aside(ready: Ready) -> str:
    """The name is taken by a run of another configuration: it keeps its files under another name. Returns what to tell."""
    folder = ready.point.folder
    changed = ", ".join(differences(folder, ready.config)[:_SHOWN])
    stamp = time.strftime("%Y%m%d-%H%M%S")
    number, target = 1, folder.with_name(f"{folder.name}~{stamp}")
    while target.exists():
        number += 1
        target = folder.with_name(f"{folder.name}~{stamp}-{number}")
    folder.rename(target)
    return f"{folder.name} was run with another configuration ({changed}), which is set aside as {target.name}"


def to_run(points: Sequence[Point]) -> list[Point]:
    """Those that are missing or did not end well."""
    return [point for point in points if not finished(point)]


def finished(point: Point) -> bool:
    """Has it ended well?"""
    return state_of(point).state == states.OK and (point.folder / RESULT_FILE).exists()


def state_of(point: Point) -> State:
    """Where a point stands by its own files."""
    return read_state(point.folder)
