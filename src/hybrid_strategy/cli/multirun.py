"""`hybrid train -m`, and single runs elsewhere (`hydra/launcher=slurm`): the points of a sweep, their results, the exit code."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace

from hybrid_strategy.cli.arguments import Arguments
from hybrid_strategy.cli.hydra_app import SWEEP_FAILED, Point, run_app
from hybrid_strategy.config.compose import CONFIG_NAME, Source, compose, read_composed, run_config
from hybrid_strategy.config.messages import Shown
from hybrid_strategy.errors import ConfigError, message
from hybrid_strategy.reporting.console import make_console
from hybrid_strategy.sweeping import states
from hybrid_strategy.sweeping.book import Book
from hybrid_strategy.sweeping.closing import closing_lines, goes_on
from hybrid_strategy.sweeping.grid import choices_of, every
from hybrid_strategy.sweeping.rows import Row, row_of
from hybrid_strategy.sweeping.session import Session
from hybrid_strategy.sweeping.settings import checked_settings
from hybrid_strategy.sweeping.sweepers import is_ours
from hybrid_strategy.sweeping.wandb_report import log_report

_HERE = ("local", "basic")
"""Launchers that have no meaning for a single run."""
_SWEPT = "hydra.sweeper.params."


def is_sweep(given: Arguments) -> bool:
    """Is it run by a sweeper and a launcher? A `sweeps=...` or another launcher asks for them as `-m` does."""
    return given.multirun or _names(given, "sweeps") is not None or _elsewhere(given)


def _names(given: Arguments, group: str) -> str | None:
    found = [each.partition("=")[2] for each in given.source.overrides if each.lstrip("+").startswith(f"{group}=")]
    return found[-1] if found and found[-1] != "null" else None


def _elsewhere(given: Arguments) -> bool:
    launcher = _names(given, "hydra/launcher")
    return launcher is not None and launcher not in _HERE


def check_sweep_settings(given: Arguments) -> None:
    """Settings of a sweep where none is run would be ignored.

    Raises:
        ConfigError: a launcher's or a sweeper's, for a single run that has none.
    """
    if given.multirun or _names(given, "sweeps") is not None:
        return
    unused = ("hydra.sweeper.", *(() if _elsewhere(given) else ("hydra.launcher.",)))
    for each in given.source.overrides:
        key, _, value = each.lstrip("+").partition("=")
        if key.startswith(unused):
            rule, job = "a single run has no use for it", "" if key.startswith(unused[0]) else ", or hydra/launcher=slurm"
            advice = f"Add -m to run a sweep{job}"
            raise ConfigError(message(key, Shown(value), rule, "", advice))


def run_sweep(given: Arguments, point: Point, target: str) -> int:
    """Runs the sweep and returns its exit code.

    Args:
        point: for launchers that call the task function themselves.
        target: what every rank calls.
    """
    single = not given.multirun and _names(given, "sweeps") is None
    command = shlex.join(["hybrid", "train", *(["-m"] if not single else []), *_where(given.source), *given.source.overrides])
    _check_one_value(given.source)
    given = replace(given, source=replace(given.source, overrides=checked_settings(given.source.overrides)))
    entry = (sys.executable, "-m", "hybrid_strategy.cli.point")
    session = Session(make_console(), command, single, target, entry)
    _check_points(given)
    try:
        code = run_app(replace(given, multirun=True), point, session)
    except KeyboardInterrupt:
        if session.points:
            print(f"\n{goes_on(session.folder)}", file=sys.stderr)
        raise
    if session.error is not None:
        raise session.error
    if session.failed and code == 0:  # they ran elsewhere, and said so there
        print("\n".join(session.failed), file=sys.stderr)
        return SWEEP_FAILED
    return close(session) if session.points and code == 0 else code


def _check_one_value(source: Source) -> None:
    """Hydra sweeps over nothing of its own, and says so without a word of how to."""
    for each in choices_of({}, source.overrides):
        if each.key.startswith(("hydra.", "hydra/")) and len(each.overrides) > 1:
            values = ", ".join(text.partition("=")[2] for text in each.overrides)
            rule = "a command line has one value of it for all points"
            advice = "Set one" if "/" in each.key else "Set one; in hydra.sweeper.points each point may have its own"
            if each.key.startswith(_SWEPT):
                advice = f"Set {each.key.removeprefix(_SWEPT)}={values.replace(' ', '')}"
            raise ConfigError(message(each.key, Shown(values), rule, "", advice))


def _check_points(given: Arguments) -> None:
    """The first point, so that a refusal leaves nothing behind; of launchers of others all, which ours look at themselves before
    anything is written: those of others write a point's files, and start it, before the next one is composed.

    Raises:
        ConfigError: something is wrong with a point.
    """
    first = _first_point(given)
    composed = compose(first)
    read_composed(composed, first)
    if not is_ours(composed):
        for overrides in every(choices_of({}, given.source.overrides)):
            run_config(replace(given.source, overrides=overrides))


def _where(source: Source) -> list[str]:
    """The flags that say where configurations are, where they are not the shipped ones."""
    folder = ["--config-dir", source.config_dir] if source.config_dir is not None else []
    return folder + (["--config-name", source.config_name] if source.config_name != CONFIG_NAME else [])


def _first_point(given: Arguments) -> Source:
    """The sweep's first combination: what is wrong with keys and words is said before Hydra starts."""
    choices = choices_of({}, given.source.overrides)
    for each in choices:
        if each.key == "sweeps" and len(each.overrides) != 1:
            rule, advice = "what it says to sweep holds for all points of a command", "Set one, and run the others after it"
            raise ConfigError(message(each.key, Shown(str(_names(given, each.key))), rule, "", advice))
    return replace(given.source, overrides=tuple(text for each in choices for text in each.overrides[:1]))


def close(session: Session) -> int:
    """Prints what came of the sweep and returns the exit code."""
    assert session.folder is not None  # known where there are points
    book = Book(session.folder, tuple(session.points), tuple(session.skipped), {"command": session.command})
    rows = [row_of(each) for each in session.points]
    problem = log_report(book) if session.ran and not session.detached and not session.single else ""
    if problem:
        session.console.print(problem, markup=False, highlight=False, soft_wrap=True)
    for line in closing_lines(book, rows, session.detached):
        session.console.print(line, markup=False, highlight=False, soft_wrap=True)
    if session.detached:
        return 0
    return _single_code(rows[0]) if session.single else sweep_code(rows)


def sweep_code(rows: Sequence[Row]) -> int:
    """5 where a point did not end well."""
    return SWEEP_FAILED if any(states.bad(row.state) for row in rows) else 0


def _single_code(row: Row) -> int:
    if row.state == states.PREEMPTED:
        return 75
    return 1 if states.bad(row.state) else 0
