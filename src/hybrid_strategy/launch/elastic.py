"""torch's elastic agent with two changes: ranks write their own logs, and none may take 30 s to leave after a failure."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
from types import FrameType
from typing import Any

from torch.distributed.elastic.agent.server.api import WorkerGroup
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs
from torch.distributed.elastic.multiprocessing.api import SignalException, SubprocessContext

from hybrid_strategy.checkpoint.stop_request import INSISTENCE, signals_to_hear

_TORCH_HANDLES = "TORCHELASTIC_SIGNALS_TO_HANDLE"
_TORCH_HANDLES_BY_DEFAULT = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")

LEAVE_SECONDS = 60
"""How long the other ranks may take to leave after the first of them has left on request."""


class RankLogs(LogsSpecs):
    """No redirection by the agent: each rank sends its output where it belongs (`launch/logs.py`)."""

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        nowhere = dict.fromkeys(envs, "")
        return LogsDest(stdouts=nowhere, stderrs=nowhere, error_files=nowhere)

    @property
    def root_log_dir(self) -> str:
        return str(self._root_log_dir)


class Agent(LocalElasticAgent):
    """Ends the peers of a failed rank within `shutdown_timeout`, and remembers who had died before that.

    torch 2.13 (multiprocessing/api.py, `SubprocessContext._poll`) gives them 30 s whatever was asked for, and ranks that wait
    in a collective for the dead one take all of it.

    Attributes:
        passes_signals_on: ranks that stop by themselves get the signals of this process; the third Ctrl-C ends them at once.
        stop_signal: the first signal that was passed on; 0 while none has come.
        first_exit_codes: rank -> exit code of those that had failed when their peers were told to stop.
    """

    passes_signals_on = False
    stop_signal = 0
    first_exit_codes: dict[int, int] | None = None
    _interrupts = 0
    _started = False
    _early: tuple[int, ...] = ()  # signals that came while ranks were being started

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        heard = signals_to_hear() if self.passes_signals_on else []
        # torch would put handlers of its own in place of ours, for which no rank is told anything
        os.environ[_TORCH_HANDLES] = ",".join(name for name in _TORCH_HANDLES_BY_DEFAULT if getattr(signal, name) not in heard)
        for number in heard:  # blocked below, in this thread only: others, of torch, still receive them for the process
            signal.signal(number, self._pass_on)
        signal.pthread_sigmask(signal.SIG_BLOCK, heard)  # inherited: a rank hears them when it has something to hear them with
        try:
            pids: dict[int, Any] = super()._start_workers(worker_group)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, heard)
        self._started = True
        for early in self._early:
            self._send(early)
        context = self._pcontext
        if isinstance(context, SubprocessContext):
            close, failures = context.close, context._failures

            def close_soon(death_sig: signal.Signals | None = None, timeout: int = 0) -> None:
                if self.first_exit_codes is None:
                    self.first_exit_codes = {rank: failure.exitcode for rank, failure in failures.items()}
                close(death_sig, LEAVE_SECONDS if self.stop_signal else self._shutdown_timeout)

            context.close = close_soon  # type: ignore[method-assign]
        return pids

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        if not self.stop_signal:
            self.stop_signal = number
            name = signal.Signals(number).name
            text = f"\n{name}: stopping after the step at hand; {INSISTENCE} x Ctrl-C in all ends at once, without a checkpoint\n"
            os.write(2, text.encode())  # a handler may come in the middle of a print
        self._interrupts += number == signal.SIGINT
        if self._interrupts >= INSISTENCE:
            raise SignalException("stopped at once", signal.Signals(number))
        if self._started:
            self._send(number)
        else:
            self._early += (number,)

    def _send(self, number: int) -> None:
        for pid in self._pcontext.pids().values() if self._pcontext is not None else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


def quieten() -> None:
    """The agent reports what it does to failing ranks in log lines of its own; the rank's traceback is what should be read.

    Each of its modules sets the level of its own logger, so each is set here. `LOGLEVEL`, torch's variable, brings them back.
    """
    if "LOGLEVEL" not in os.environ:
        for name in list(logging.root.manager.loggerDict):
            if name.startswith("torch.distributed.elastic"):
                logging.getLogger(name).setLevel(logging.CRITICAL)
