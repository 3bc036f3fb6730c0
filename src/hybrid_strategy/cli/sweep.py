"""`hybrid sweep status|logs|cancel|resume|report NAME`: what a sweep's folder tells, from any shell."""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from hybrid_strategy.cli.hydra_app import SWEEP_FAILED
from hybrid_strategy.cli.multirun import close, sweep_code
from hybrid_strategy.config.folders import name_folder
from hybrid_strategy.errors import ConfigError, did_you_mean, message, of_file_system
from hybrid_strategy.files import json_of
from hybrid_strategy.launch.job import log_path
from hybrid_strategy.reporting.console import make_console
from hybrid_strategy.sweeping import states
from hybrid_strategy.sweeping.attempts import conclude, note_abandoned, read_state
from hybrid_strategy.sweeping.book import LOST, SWEEP_FILE, Book, open_book, to_run
from hybrid_strategy.sweeping.launchers import RUNNERS
from hybrid_strategy.sweeping.launching import run_points
from hybrid_strategy.sweeping.lock import abandoned, holder, locked
from hybrid_strategy.sweeping.points import Point
from hybrid_strategy.sweeping.report.page import REPORT_FILE
from hybrid_strategy.sweeping.results import CSV_FILE, JSON_FILE, result_rows, write_results
from hybrid_strategy.sweeping.rows import row_of
from hybrid_strategy.sweeping.screen import skipped_lines, summary, table
from hybrid_strategy.sweeping.session import Session
from hybrid_strategy.sweeping.slurm import commands
from hybrid_strategy.sweeping.slurm.script import BATCH_LOG, SCRIPT_FILE
from hybrid_strategy.sweeping.slurm.watching import Watcher, outage_line
from hybrid_strategy.sweeping.wandb_report import log_report

_LINES = 40
_ENDING_SECONDS = 20.0
"""How long a command on this machine may take to save and end its points."""


def run(arguments: Sequence[str]) -> int:
    """The sub-command."""
    given = _parser().parse_args(list(arguments))
    _check_used(given)
    book = open_book(folder_of(given.name, given.output_dir))
    _refresh(book)
    code: int = VERBS[given.verb](book, given)
    return code or (SWEEP_FAILED if any(each.kind == LOST for each in book.skipped) else 0)


def _parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="hybrid sweep",
        description="What came of a sweep, and what to do about it.",
        epilog="exit codes: 0 all well so far, 2 no such sweep, 5 a point has not ended well",
        allow_abbrev=False,
    )
    made.add_argument("verb", choices=tuple(VERBS), help="what to do")
    made.add_argument("name", metavar="NAME", help="name of a sweep, or its folder")
    made.add_argument("point", nargs="?", metavar="POINT", help="logs, cancel: only this point")
    made.add_argument("--output-dir", default="outputs", metavar="FOLDER", help="where sweeps are looked for (outputs)")
    made.add_argument("--json", action="store_true", help="status: as JSON")
    made.add_argument("--lines", type=int, metavar="N", help=f"logs: the last N lines ({_LINES})")
    return made


def _check_used(given: argparse.Namespace) -> None:
    """Refuses what this verb would ignore."""
    for key, value, verbs in (
        ("POINT", given.point, ("logs", "cancel")),
        ("--json", given.json or None, ("status",)),
        ("--lines", given.lines, ("logs",)),
    ):
        if value is not None and given.verb not in verbs:
            rule, advice = f"{given.verb} has no use for it", f"Leave it out, or use {' or '.join(verbs)}"
            raise ConfigError(message(key, value, rule, "", advice))
    if given.lines is not None and given.lines < 1:
        raise ConfigError(message("--lines", given.lines, "it must be 1 or more", "", f"Set {_LINES}"))


def folder_of(name: str, output_dir: str) -> Path:
    """The folder of a sweep: a path that holds one, else the name below the output folder."""
    path = Path(name).expanduser()
    if (path / SWEEP_FILE).is_file() or (path.is_dir() and path != Path(path.name)):
        return path.resolve()
    return Path(name_folder(f"{output_dir}/sweeps", name)).absolute()


def _refresh(book: Book) -> None:
    """Asks Slurm about jobs that have not said how they ended; notes what a command on this machine left as it was killed."""
    open_points = [point for point in book.points if read_state(point.folder).job and not _ended(point)]
    watcher = Watcher(patience_seconds=0.0)
    try:
        watcher.look(open_points)
        if abandoned(book.folder):
            note_abandoned(book.points)
    except OSError as error:  # a sweep of somebody else may be looked at
        print(
            f"what came of its points cannot be kept, so this is how they stood last: {of_file_system(error)}",
            file=sys.stderr,
        )
    if watcher.outage:
        print(outage_line(watcher.outage), file=sys.stderr)


def _ended(point: Point) -> bool:
    return read_state(point.folder).state in states.ENDED


def status(book: Book, given: argparse.Namespace) -> int:
    """The table, or the rows as JSON."""
    rows = [row_of(point) for point in book.points]
    if given.json:
        print(json_of({"name": book.name, "folder": str(book.folder), "results": result_rows(book)}))
        return sweep_code(rows)
    console = make_console()
    console.print(table(rows, console.width, live=False))
    for line in [summary(rows), *skipped_lines(book.skipped)]:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    return sweep_code(rows)


def logs(book: Book, given: argparse.Namespace) -> int:
    """The end of the log that matters: of the rank that failed, else of the first one."""
    chosen = _chosen(book, given.point)
    if given.point is None:
        chosen = [point for point in chosen if states.bad(row_of(point).state)] or chosen[:1]
    for point in chosen:
        path = _log_of(point)
        print(f"==> {path}")
        text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else "(nothing yet)"
        print("\n".join(text.splitlines()[-(given.lines or _LINES) :]))
    return 0


def _log_of(point: Point) -> Path:
    folder = point.folder
    failed = sorted((folder / "logs").glob("rank*.error.json"))
    rank = int(failed[0].name.removeprefix("rank").partition(".")[0]) if failed else 0
    result = json.loads((folder / "result.json").read_text()) if (folder / "result.json").exists() else {}
    if isinstance(result.get("rank"), int):
        rank = result["rank"]
    for path in (log_path(folder / "logs", rank), folder / BATCH_LOG, folder / "output.log"):
        if path.exists():
            return path
    return folder / (BATCH_LOG if (folder / SCRIPT_FILE).exists() else "output.log")


def cancel(book: Book, given: argparse.Namespace) -> int:
    """Ends the jobs of a sweep, or of one point; on this machine the command that runs the points."""
    if book.settings.get("launcher") == "local":
        return _cancel_here(book, given)
    alive = [point for point in _chosen(book, given.point) if read_state(point.folder).job and not _ended(point)]
    commands.cancel([read_state(point.folder).job for point in alive])
    for point in alive:
        conclude(point.folder, states.CANCELLED, "cancelled with `hybrid sweep cancel`")
    write_results(book)
    print(f"{len(alive)} cancelled")
    return 0


def _cancel_here(book: Book, given: argparse.Namespace) -> int:
    """The points of the local launcher are the children of one command: told to end, it saves and ends them."""
    found = holder(book.folder)
    if found is None:
        print("0 cancelled: nothing of it is running")
        return 0
    host, pid = found
    if given.point is not None:
        rule = "points on one machine are ended together with the command that runs them"
        raise ConfigError(message("POINT", given.point, rule, f"That is process {pid}", "Leave it out"))
    if host != socket.gethostname() or not pid:
        raise ConfigError(
            message("NAME", book.name, "it is run on another machine", f"Process {pid} of {host}", "Cancel it there")
        )
    running = sum(read_state(point.folder).state == states.RUNNING for point in book.points)
    os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + _ENDING_SECONDS
    while holder(book.folder) is not None and time.monotonic() < deadline:
        time.sleep(0.1)
    print(f"{running} cancelled: process {pid} was told to end; `hybrid sweep resume {book.folder}` goes on")
    return 0


def resume(book: Book, given: argparse.Namespace) -> int:
    """Runs what is missing or did not end well, as the sweep was started: where modules and files were found, too."""
    settings = book.settings
    started_in = settings.get("folder")
    if started_in is not None and os.path.isdir(str(started_in)):
        os.chdir(str(started_in))
    entry = (sys.executable, "-m", "hybrid_strategy.cli.point")
    session = Session(
        make_console(), str(settings.get("command", "")), bool(settings.get("single")), str(settings["target"]), entry
    )
    session.folder, session.points, session.skipped = book.folder, list(book.points), list(book.skipped)
    runner = RUNNERS[str(settings["launcher"])](settings["launcher_settings"], session)
    with locked(book.folder):
        if to_run(book.points):
            run_points(book, runner, session)
    return close(session)


def report(book: Book, given: argparse.Namespace) -> int:
    """Writes the results anew from the points' folders."""
    write_results(book)
    problem = log_report(book)
    if problem:
        print(problem, file=sys.stderr)
    rows = [row_of(point) for point in book.points]
    for name in (CSV_FILE, JSON_FILE, REPORT_FILE):
        if (book.folder / name).exists():
            print(book.folder / name)
    return sweep_code(rows)


def _chosen(book: Book, name: str | None) -> list[Point]:
    if name is None:
        return list(book.points)
    found = [point for point in book.points if point.name == name]
    if not found:
        advice = did_you_mean(name, [point.name for point in book.points])
        raise ConfigError(message("POINT", name, f"the sweep {book.name} has no such point", "", advice))
    return found


VERBS: Mapping[str, Callable[[Book, argparse.Namespace], int]] = {
    "status": status,
    "logs": logs,
    "cancel": cancel,
    "resume": resume,
    "report": report,
}
