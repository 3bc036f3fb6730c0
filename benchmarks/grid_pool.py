"""Processes that are started once and run one point after another; killed and started anew where one hangs or dies."""

from __future__ import annotations

import gc
import multiprocessing
import os
import socket
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

_GRACE_SECONDS = 20.0
"""What is wrong with one rank its peers notice within this time, or never."""


class RefusedError(Exception):
    """Every rank refused, with the same words."""


class FailedError(Exception):
    """A rank failed, hung, or refused alone."""


def _let_go() -> None:
    """Frees what the job left in reference cycles: process groups among it, whose threads go on until then."""
    gc.collect()
    if not gc.get_freeze_count():
        gc.freeze()  # the imported libraries are a million objects that need no second look


def _serve(connection: Connection) -> None:
    import logging

    import torch
    import torch.distributed as dist

    from hybrid_strategy.errors import ConfigError

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    while True:
        try:
            function, arguments, environment = connection.recv()
        except EOFError:
            return
        os.environ.update(environment)
        try:
            answer = ("done", function(*arguments))
        except ConfigError as error:
            answer = ("refused", str(error))
        except BaseException:
            answer = ("failed", traceback.format_exc())
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
        _let_go()
        connection.send(answer)


class Pool:
    """Worker processes of this machine, as many as the largest point needed so far."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["lightning.pytorch", "hybrid_strategy.strategy.hybrid"])
        self._workers: list[tuple[Any, Connection]] = []

    def run(self, function: Callable[..., Any], world_size: int, *arguments: Any, timeout: float) -> list[Any]:
        """Calls `function(*arguments)` on so many ranks; what they returned, by rank.

        Raises:
            RefusedError: every rank raised the same ConfigError.
            FailedError: anything else that went wrong.
        """
        self._start(world_size)
        port = _free_port()
        for rank in range(world_size):
            self._workers[rank][1].send((function, arguments, _environment(rank, world_size, port)))
        answers = self._collect(world_size, timeout)
        words = {rank: text for rank, (kind, text) in answers.items() if kind != "done"}
        if not words and len(answers) == world_size:
            return [answers[rank][1] for rank in range(world_size)]
        refused = {text for kind, text in answers.values() if kind == "refused"}
        if len(answers) == world_size and len(refused) == 1 and all(kind == "refused" for kind, _ in answers.values()):
            raise RefusedError(refused.pop())
        self.close()
        silent = sorted(set(range(world_size)) - answers.keys())
        lines = [f"rank {rank}: {text}" for rank, text in words.items()] + ([f"ranks {silent} did not answer"] if silent else [])
        raise FailedError("\n".join(lines))

    def close(self) -> None:
        """Ends the processes."""
        for process, connection in self._workers:
            connection.close()
            process.kill()
            process.join()
        self._workers.clear()

    def _start(self, count: int) -> None:
        while len(self._workers) < count:
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._workers.append((process, ours))

    def _collect(self, world_size: int, timeout: float) -> dict[int, tuple[str, Any]]:
        """Answers by rank; after the first that is not good, what comes within the time of grace."""
        pending = {self._workers[rank][1]: rank for rank in range(world_size)}
        answers: dict[int, tuple[str, Any]] = {}
        deadline = time.monotonic() + timeout
        while pending:
            ready = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                rank = pending.pop(connection)  # type: ignore[index]
                try:
                    answers[rank] = connection.recv()  # type: ignore[union-attr]
                except EOFError:
                    answers[rank] = ("failed", "the process died")
                if answers[rank][0] != "done":
                    deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
        return answers


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def _environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": f"grid-{port}",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "GLOO_SOCKET_IFNAME": "lo",
    }
