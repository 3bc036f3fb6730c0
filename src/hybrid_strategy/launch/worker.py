"""The entry of every worker process: `python -m hybrid_strategy.launch.worker <package.module:function> <run folder>`.

Ties itself to its parent, sends its output to the rank's log, calls `function(run folder)` and records how it failed.
"""

from __future__ import annotations

import atexit
import gc
import os
import pkgutil
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from hybrid_strategy.checkpoint.stop_request import REQUEST, signals_to_hear
from hybrid_strategy.errors import PreemptedError
from hybrid_strategy.launch import failures, logs, parent_death
from hybrid_strategy.launch.job import LISTEN_VARIABLE, log_path


def run(target: str, run_dir: Path, rank: int) -> int:
    """Calls the target; returns the exit code of this rank."""
    log_dir = run_dir / "logs"
    logs.redirect(log_path(log_dir, rank), terminal=rank == 0)
    try:
        with REQUEST.leaving_by(_leave_if_told):
            function = _imported(target)
        _leave_if_told()  # libraries may have caught what a signal raised among their imports
        function(run_dir)
    except KeyboardInterrupt:
        return 130
    except BaseException as error:
        if isinstance(error, SystemExit) and not error.code:
            return 0
        failure = failures.record(log_dir, rank, error)
        with log_path(log_dir, rank).open("a", encoding="utf-8") as log:  # the parent shows the first one on the terminal
            log.write(failure.traceback)
        return failure.exit_code
    return 0


def _imported(target: str) -> Callable[[Path], None]:
    """The function, after seconds of imports: a fifth of them would go into looking for garbage among what stays."""
    gc.disable()
    function: Callable[[Path], None] = pkgutil.resolve_name(target)
    gc.freeze()
    gc.enable()
    return function


def _leave_if_told() -> None:
    """A request to stop that came while this process was starting: there is nothing to save."""
    if REQUEST.signal_number == signal.SIGINT:
        raise KeyboardInterrupt
    if REQUEST.signal_number:
        raise PreemptedError(f"stopped by {REQUEST.name} before training began")


def leave() -> None:
    """Ends the process with 0, without taking the interpreter apart.

    What is registered to run at the end runs, and threads that must be waited for are waited for, in the interpreter's own order:
    pools of threads (a compiler's, a dataset's) are told to end first, or there would be no end to the waiting. Process groups
    are left to the system: their threads may hold the last reference to what they would have to wait for, which aborts the
    process.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def main() -> None:
    """Runs and leaves without waiting for what a dead peer will never answer."""
    parent_death.guard()
    if os.environ.get(LISTEN_VARIABLE):
        REQUEST.listen()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals_to_hear())  # held back while there was no handler
    code = run(sys.argv[1], Path(sys.argv[2]), int(os.environ.get("RANK", "0")))
    sys.stdout.flush()
    sys.stderr.flush()
    if code:
        os._exit(code)
    leave()


if __name__ == "__main__":
    main()
