"""What every launcher of ours does: prepares the points, keeps the book, runs what is missing, sums up."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from hydra.core.utils import JobReturn, JobStatus
from omegaconf import OmegaConf

from hybrid_strategy.config.here import check_folders
from hybrid_strategy.config.messages import Shown
from hybrid_strategy.errors import ConfigError, HybridError, NoLayoutFitsError, message, of_file_system
from hybrid_strategy.files import as_number, read_json
from hybrid_strategy.sweeping import book as books
from hybrid_strategy.sweeping.attempts import State
from hybrid_strategy.sweeping.book import Book
from hybrid_strategy.sweeping.layouts import Skipped
from hybrid_strategy.sweeping.lock import locked
from hybrid_strategy.sweeping.points import Point
from hybrid_strategy.sweeping.prepare import Batch, Ready, prepare
from hybrid_strategy.sweeping.results import write_results
from hybrid_strategy.sweeping.screen import Screen, make_screen
from hybrid_strategy.sweeping.session import Session
from hybrid_strategy.sweeping.settings import OF_THE_SWEEP


class Runner(Protocol):
    """How points are run; one for each launcher."""

    def run(self, points: Sequence[Point], tick: Callable[[], None]) -> None:
        """Runs the points and returns when all have ended, or when it does not wait for them."""

    def alive(self, point: Point) -> bool:
        """Is something of this point waiting or running already?"""


@dataclass(frozen=True)
class Launch:
    """A launcher's task. `kind` is its name, `make` makes its runner from settings as Hydra has them."""

    kind: str
    settings: Mapping[str, Any]
    make: Callable[[Mapping[str, Any], Session], Runner]
    show: Callable[[Mapping[str, Any], Session, Sequence[Ready]], bool]


def launch(task: Launch, batch: Batch, session: Session) -> list[JobReturn]:
    """Hydra's `Launcher.launch`. Errors are kept in the session: Hydra would print them its own way."""
    try:
        return _launch(task, batch, session)
    except HybridError as error:
        session.error = error
    except OSError as error:
        session.error = of_file_system(error, str(session.folder))
    return []


def _launch(task: Launch, batch: Batch, session: Session) -> list[JobReturn]:
    runner = task.make(task.settings, session)
    folder = Path(str(batch.master.hydra.run.dir if session.single else batch.master.hydra.sweep.dir)).absolute()
    session.folder = folder
    ready = prepare(batch, session, folder)
    if not ready:
        raise nothing_to_run(session.skipped)
    _check_for_all(task, ready)
    if task.show(task.settings, session, ready):  # a dry run
        return [_returned(each, batch, State()) for each in ready]
    check_folders(ready[0].config)
    with locked(folder):
        say = partial(session.console.print, markup=False, highlight=False, soft_wrap=True)
        names = {each.name for each in session.points} | {each.point.name for each in ready}
        kept = books.others(folder, names, runner.alive, say)
        session.points.extend((*books.enter(ready, runner.alive, say), *kept))
        book = books.Book(folder, tuple(session.points), tuple(session.skipped), _settings(task, session))
        books.keep(book)
        run_points(book, runner, session)
    return [_returned(each, batch, books.state_of(each.point)) for each in ready]


def _check_for_all(task: Launch, ready: Sequence[Ready]) -> None:
    """Settings of a launcher may differ from point to point, but not those of the command itself: they would be ignored."""
    for each in ready:
        for name in OF_THE_SWEEP:
            value = each.point.launcher.get(name)
            if value != task.settings.get(name):
                rule, numbers = "it holds for the whole sweep", f"{each.point.name} has it of its own"
                raise ConfigError(message(f"hydra.launcher.{name}", Shown(str(value)), rule, numbers, "Set one value"))


def run_points(book: Book, runner: Runner, session: Session) -> None:
    """Runs what is missing of a book and leaves its results, whatever happens on the way."""
    screen: Screen = make_screen(book, session.console)
    missing = books.to_run(book.points)
    session.ran += len(missing)
    screen.start(missing)
    try:
        runner.run(missing, screen.tick)
    finally:
        screen.stop()
        write_results(book)


def nothing_to_run(skipped: Sequence[Skipped]) -> HybridError:
    """The error of a sweep without a single point that can be run."""
    if not skipped:
        return ConfigError(message("sweep", "empty", "it has no point", "", "Set values to sweep, e.g. seed=1,2"))
    kinds = {each.kind for each in skipped}
    total = sum(each.count for each in skipped)
    first = next((each for each in skipped if each.kind == "memory"), skipped[0])
    text = f"none of {total} points can be run. {first.name}: {first.reason}"
    return NoLayoutFitsError(text) if "memory" in kinds else ConfigError(text)


def _settings(task: Launch, session: Session) -> dict[str, Any]:
    return {
        "command": session.command,
        "folder": os.getcwd(),
        "launcher": task.kind,
        "launcher_settings": dict(task.settings),
        "target": session.target,
        "single": session.single,
    }


def _returned(ready: Ready, batch: Batch, state: State) -> JobReturn:
    """What Hydra's sweepers get: the objective of a point, None where there is none. A failed point is no exception."""
    result = read_json(ready.point.folder / "result.json") or {}
    made = JobReturn()
    made.overrides, made.working_dir = list(ready.point.overrides), str(ready.point.folder)
    made.cfg = OmegaConf.create({})
    made.status = JobStatus.COMPLETED
    made.return_value = as_number(result.get("last_validation_loss")) if state.state == "ok" else None
    return made
