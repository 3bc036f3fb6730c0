"""torch's elastic agent with two changes: ranks write their own logs, and none may take 30 s to leave after a failure."""

from __future__ import annotations

import logging
import os
import signal
from typing import Any

from torch.distributed.elastic.agent.server.api import WorkerGroup
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs
from torch.distributed.elastic.multiprocessing.api import SubprocessContext


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
        first_exit_codes: rank -> exit code of those that had failed when their peers were told to stop.
    """

    first_exit_codes: dict[int, int] | None = None

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        pids: dict[int, Any] = super()._start_workers(worker_group)
        context = self._pcontext
        if isinstance(context, SubprocessContext):
            close, failures = context.close, context._failures

            def close_soon(death_sig: signal.Signals | None = None, timeout: int = 0) -> None:
                if self.first_exit_codes is None:
                    self.first_exit_codes = {rank: failure.exitcode for rank, failure in failures.items()}
                close(death_sig, self._shutdown_timeout)

            context.close = close_soon  # type: ignore[method-assign]
        return pids


def quieten() -> None:
    """The agent reports what it does to failing ranks in log lines of its own; the rank's traceback is what should be read.

    Each of its modules sets the level of its own logger, so each is set here. `LOGLEVEL`, torch's variable, brings them back.
    """
    if "LOGLEVEL" not in os.environ:
        for name in list(logging.root.manager.loggerDict):
            if name.startswith("torch.distributed.elastic"):
                logging.getLogger(name).setLevel(logging.CRITICAL)
