"""Processes of this machine, started and watched by torch's elastic agent. No restarts: a run that failed says why."""

from __future__ import annotations

import os
import signal
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from hybrid_strategy.launch.failures import explain, raise_if_stopped
from hybrid_strategy.launch.job import LISTEN_VARIABLE, Job, error_path
from hybrid_strategy.launch.parent_death import PARENT_VARIABLE

if TYPE_CHECKING:
    from hybrid_strategy.launch.elastic import Agent

SHUTDOWN_SECONDS = 3
"""How long ranks may take to leave after the first failure or Ctrl-C before they are killed."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)


class LocalLauncher:
    """One agent in this process, `world_size` fresh processes below it, each in a session of its own."""

    name = "local"

    def run(self, job: Job) -> None:
        """See `Launcher.run`. Environment and signal handlers of this process are as before when it returns."""
        job.log_dir.mkdir(parents=True, exist_ok=True)
        for rank in range(job.world_size):
            error_path(job.log_dir, rank).unlink(missing_ok=True)
        with _restored(), _interruptible():
            os.environ.update(_environment(job))
            agent = _agent(job)
            agent.passes_signals_on = job.stops_itself
            try:
                result = agent.run()
            finally:  # its heartbeat, where it is the last to hold the rendezvous, would wait for itself to end
                agent.get_worker_group().spec.rdzv_handler.shutdown()
        if result.is_failed():
            raise_if_stopped(job.log_dir, job.world_size, agent.stop_signal, agent.first_exit_codes or {})
            raise explain(job.log_dir, job.world_size, agent.first_exit_codes or {})


def _environment(job: Job) -> dict[str, str]:
    threads = max(1, len(os.sched_getaffinity(0)) // job.world_size) if hasattr(os, "sched_getaffinity") else 1
    values = {
        # n ranks with one thread a core each would fight for the cores
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
        "PYTHONUNBUFFERED": "1",
        PARENT_VARIABLE: str(os.getpid()),
    }
    if job.stops_itself:
        values[LISTEN_VARIABLE] = "1"
    if sys.platform == "linux":
        # gloo looks up the host's own name otherwise, which many machines cannot resolve
        values["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    return values | dict(job.environment)


def _agent(job: Job) -> Agent:
    """The agent. Imported here because torch takes seconds, and a refused configuration never comes this far."""
    import torch.distributed.elastic.rendezvous.registry as rendezvous
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.rendezvous import RendezvousParameters

    from hybrid_strategy.launch.elastic import Agent, RankLogs, quieten

    quieten()
    parameters = RendezvousParameters(
        backend="c10d",
        endpoint="127.0.0.1:0",  # a free port, chosen by the kernel
        run_id=uuid.uuid4().hex,
        min_nodes=1,
        max_nodes=1,
        local_addr="127.0.0.1",
        is_host=True,
    )
    spec = WorkerSpec(
        role="rank",
        local_world_size=job.world_size,
        entrypoint=sys.executable,
        # the agent fills templates into arguments: a dollar sign of a path must be doubled
        args=("-m", "hybrid_strategy.launch.worker", job.target, str(job.run_dir).replace("$", "$$")),
        rdzv_handler=rendezvous.get_rendezvous_handler(parameters),
        max_restarts=0,
        monitor_interval=0.1,
        local_addr="127.0.0.1",
    )
    return Agent(spec, RankLogs(str(job.log_dir)), shutdown_timeout=SHUTDOWN_SECONDS)


@contextmanager
def _restored() -> Iterator[None]:
    """The agent sets variables and signal handlers and leaves them: the next run of a sweep must not find them."""
    environment = dict(os.environ)
    handlers = {each: signal.getsignal(each) for each in _SIGNALS}
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(environment)
        for number, handler in handlers.items():
            signal.signal(number, handler)


@contextmanager
def _interruptible() -> Iterator[None]:
    """Turns the agent's own exception for signals into what Python means by them."""
    try:
        yield
    except Exception as error:
        number = getattr(error, "sigval", None)
        if number is None:
            raise
        if number == signal.SIGINT:
            raise KeyboardInterrupt from error
        raise SystemExit(128 + int(number)) from error


PART = LocalLauncher()
