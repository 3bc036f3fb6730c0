"""Runs a function on ranks that really end: processes forked from one that has imported all, and has done nothing yet.

Where a rank fails, its process ends, and with it its connections, as in a real run; so one spawn serves many failures. A worker
that has already had process groups, or threads, is no parent for them: a copy of it has the locks of those threads, not them.
"""

from __future__ import annotations

import os
import pickle
import select
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tests.support.ranks import environment_of, free_port, kill_workers, run_ranks


@dataclass(frozen=True)
class Ending:
    """How one rank of a case ended, `seconds` after the start of the case.

    `traceback` is `None` where it did not fail, the signal where it died of one, and empty where it had to be killed.
    """

    value: Any
    traceback: str | None
    seconds: float


def run_cases(
    function: Callable[..., Any], world_size: int, cases: Sequence[tuple[Any, ...]], limit: float, grace: float = 3.0
) -> list[list[Ending]]:
    """`function(*case)` on `world_size` ranks, case after case; `[case][rank]`.

    Args:
        limit: seconds after which the ranks of a case are killed.
        grace: seconds that ranks get after the first has failed, as a launcher would give them.
    """
    seconds = 60 + limit * len(cases)
    kill_workers()  # what runs the cases is to be a new one
    found: list[list[Ending]] = run_ranks(
        _serve, 1, function, world_size, list(cases), limit, grace, timeout=seconds, process_group=False
    )[0]
    return found


def _serve(
    function: Callable[..., Any], world_size: int, cases: list[tuple[Any, ...]], limit: float, grace: float
) -> list[list[Ending]]:
    endings = []
    for case in cases:
        port = free_port()
        ranks = [_fork(function, case, environment_of(rank, world_size, port)) for rank in range(world_size)]
        found = _endings([reader for _, reader in ranks], limit, grace)
        endings.append([_ended(process, ending) for (process, _), ending in zip(ranks, found, strict=True)])
    return endings


def _ended(process: int, ending: Ending) -> Ending:
    """Kills what still runs; with the signal of one that had died of another."""
    os.kill(process, signal.SIGKILL)
    number = os.waitpid(process, 0)[1] & 0x7F
    if ending.traceback == "" and number != signal.SIGKILL:
        return replace(ending, traceback=f"the process died of signal {number}")
    return ending


def _fork(function: Callable[..., Any], case: tuple[Any, ...], environment: dict[str, str]) -> tuple[int, int]:
    """The process, and where it writes its ending."""
    reader, writer = os.pipe()
    process = os.fork()
    if process:
        os.close(writer)
        return process, reader
    os.environ.update(environment)
    started, code = time.monotonic(), 1
    try:
        value = function(*case)
        ending, code = Ending(value, None, time.monotonic() - started), 0
    except BaseException:
        ending = Ending(None, traceback.format_exc(), time.monotonic() - started)
    with os.fdopen(writer, "wb") as file:
        file.write(pickle.dumps(ending))
    os._exit(code)


def _endings(readers: list[int], limit: float, grace: float) -> list[Ending]:
    found: dict[int, Ending] = {}
    deadline = time.monotonic() + limit
    while len(found) < len(readers) and time.monotonic() < deadline:
        waiting = [each for each in readers if each not in found]
        for each in select.select(waiting, [], [], max(0.0, deadline - time.monotonic()))[0]:
            with os.fdopen(each, "rb", closefd=False) as file:
                content = file.read()
            found[each] = pickle.loads(content) if content else Ending(None, "", limit)
            if found[each].traceback is not None:
                deadline = min(deadline, time.monotonic() + grace)
    for each in readers:
        os.close(each)
    return [found.get(each, Ending(None, "", limit)) for each in readers]
