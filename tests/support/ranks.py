"""Runs a function on several real processes joined by gloo, quickly: the workers are started once a test session.

    results = run_ranks(function, 2, argument, timeout=60)      # results[r] is what rank r returned

`function(*arguments)` runs in every rank with `RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `MASTER_ADDR`, `MASTER_PORT` set as torchrun
sets them (no process group yet, unless `process_group=True`). It must be a top-level function of a test module. When a rank
fails, its traceback is raised here; when a rank hangs, all workers are killed and the case fails.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import faulthandler
import fcntl
import functools
import gc
import io
import itertools
import logging
import multiprocessing
import os
import pickle
import socket
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    ["lightning.pytorch", "torchmetrics", "hybrid_strategy.strategy.hybrid"]
)  # imported once, not by every rank
_workers: list[tuple[Any, Connection]] = []


class RankFailedError(AssertionError):
    """A rank raised; carries the traceback of the first rank that did."""


_ports = itertools.count(int.from_bytes(os.urandom(2), "big"))
_taken: collections.deque[int] = collections.deque()


def free_port() -> int:
    """A port of 10,000 to 32,000: below those that the system gives to connections, so that none takes it in the meantime.

    Of several test processes that look for one at a time only one gets it: the last 64 of each are locked.
    """
    folder = Path(tempfile.gettempdir(), f"hybrid-strategy-test-ports-{os.getuid()}")
    folder.mkdir(exist_ok=True)
    for number in _ports:
        port = 10_000 + number % 22_000
        _taken.append(os.open(folder / str(port), os.O_CREAT | os.O_RDWR))
        if len(_taken) > 64:
            os.close(_taken.popleft())
        with socket.socket() as sock, contextlib.suppress(OSError):
            fcntl.flock(_taken[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
            sock.bind(("127.0.0.1", port))
            return port
    raise AssertionError("the count does not end")


def environment_of(rank: int, world_size: int, port: int) -> dict[str, str]:
    """What torchrun would set for this rank."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": f"tests-{port}",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "GLOO_SOCKET_IFNAME": "lo",
    }


def _let_go() -> None:
    """Frees what the job left in reference cycles: process groups among it, whose threads go on until then."""
    gc.collect()


def _left_behind() -> str:
    """What the job left that nothing frees: tensors with a graph behind them, such as a hook that holds its own tensor."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensor

    kinds = {kind: issubclass(kind, torch.Tensor) and kind is not FakeTensor for kind in set(map(type, gc.get_objects()))}
    left = [each for each in gc.get_objects() if kinds.get(type(each)) and each.grad_fn is not None]
    return f"{len(left)} tensors outlive the job: {[(type(each).__name__, *each.shape) for each in left[:8]]}" if left else ""


class _Packer(pickle.Pickler):
    """Plain tensors as their bytes: torch would hand over thousands of small ones through a file each."""

    def reducer_override(self, obj: Any) -> Any:
        import torch

        if type(obj) is not torch.Tensor or obj.requires_grad or obj.layout is not torch.strided or obj.device.type != "cpu":
            return NotImplemented
        data = obj.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return _unpacked, (data, obj.dtype, tuple(obj.shape))


def _unpacked(data: bytes, dtype: Any, shape: tuple[int, ...]) -> Any:
    import torch

    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape) if data else torch.empty(shape, dtype=dtype)


def _packed(value: Any) -> bytes:
    stream = io.BytesIO()
    _Packer(stream).dump(value)
    return stream.getvalue()


def _serve(connection: Connection) -> None:
    import torch
    import torch.distributed as dist
    from lightning.fabric.utilities import registry

    faulthandler.enable()  # a rank that dies in native code says where
    multiprocessing.set_start_method(None, force=True)  # loaders start workers as they do under torchrun, not as we start this
    torch.set_num_threads(1)
    registry.entry_points = functools.cache(registry.entry_points)  # every Trainer asks what is installed: 30 ms
    looked_over = 0
    untouched = dict(os.environ)
    talkers = {name: logging.getLogger(name).level for name in ("lightning.pytorch", "lightning.fabric")}
    while True:
        try:
            job = connection.recv()
        except EOFError:
            return
        if looked_over < len(sys.modules):  # what jobs have imported are a million objects that need no second look
            gc.freeze()
            looked_over = len(sys.modules)
        function, arguments, environment, process_group = job
        os.environ.clear()  # of what an earlier job set in this process, and not in that of its peer
        os.environ.update(untouched | environment)
        for name, level in talkers.items():
            logging.getLogger(name).setLevel(level)  # an earlier job may have silenced them
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                warnings.filterwarnings("error", "`torch.distributed", FutureWarning)  # of a name that will go
                if process_group:
                    dist.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
                    dist.barrier()  # one that is done at once would go while the others are still connecting to it
                value = function(*arguments)
            answer = (True, value)
        except BaseException:
            answer = (False, traceback.format_exc())
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
            groups = sys.modules.get("hybrid_strategy.distributed.groups")
            if groups is not None:  # what is frozen before the next job is not to hold this one's groups
                groups.forget_ended()
        _let_go()
        if answer[0] and _left_behind():  # perhaps in a cycle through what has been frozen
            gc.unfreeze()
            looked_over = 0
            _let_go()
            if left := _left_behind():
                answer = (False, left)
        try:
            data = _packed(answer)
        except Exception:
            data = _packed((False, traceback.format_exc()))
        connection.send_bytes(data)


def _start(count: int) -> None:
    while len(_workers) < count:
        ours, theirs = _context.Pipe()
        process = _context.Process(target=_serve, args=(theirs,))  # no daemon: a loader in it may start workers
        process.start()
        theirs.close()
        _workers.append((process, ours))


@atexit.register
def kill_workers() -> None:
    """Ends all workers; the next case starts new ones."""
    for process, connection in _workers:
        connection.close()
        process.kill()
    _workers.clear()


def run_ranks(
    function: Callable[..., Any], world_size: int, *arguments: Any, timeout: float = 90, process_group: bool = True
) -> list[Any]:
    """Runs `function(*arguments)` on `world_size` ranks and returns their results by rank.

    Raises:
        RankFailedError: a rank raised, or did not answer within `timeout` seconds.
    """
    _start(world_size)
    port = free_port()
    for rank in range(world_size):
        job = (function, arguments, environment_of(rank, world_size, port), process_group)
        _workers[rank][1].send(job)
    pending = {_workers[rank][1]: rank for rank in range(world_size)}
    results: list[Any] = [None] * world_size
    deadline = time.monotonic() + timeout
    while pending:
        ready = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            waiting = sorted(pending.values())
            kill_workers()
            raise RankFailedError(f"ranks {waiting} did not answer within {timeout} s")
        for connection in ready:
            rank = pending.pop(connection)  # type: ignore[index]
            good, value = _answer(rank, connection)
            if not good:
                failures = [(rank, value), *_collect_failures(pending)]
                kill_workers()
                raise RankFailedError("\n".join(f"rank {each}: {text}" for each, text in failures))
            results[rank] = value
    return results


def _collect_failures(pending: dict[Any, int], seconds: float = 5.0) -> list[tuple[int, str]]:
    """What the other ranks raise soon after: often the cause, where the first answer was a consequence."""
    failures = []
    deadline = time.monotonic() + seconds
    while pending and (ready := wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))):
        for connection in ready:
            rank = pending.pop(connection)
            good, value = _answer(rank, connection)
            if not good:
                failures.append((rank, value))
    return failures


def _answer(rank: int, connection: Any) -> tuple[bool, Any]:
    """Whether it went well, and what the rank returned or raised."""
    try:
        good, value = pickle.loads(connection.recv_bytes())
        return good, value
    except EOFError:
        process = _workers[rank][0]
        process.join(5)
        return False, f"the process died, exit code {process.exitcode}"
