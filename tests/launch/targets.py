"""What the worker processes of the launcher's tests run."""

from __future__ import annotations

import atexit
import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from hybrid_strategy.errors import LayoutError

_pools: list[ThreadPoolExecutor] = []


def _rank() -> int:
    return int(os.environ["RANK"])


def report(run_dir: Path) -> None:
    """Leaves the environment of this rank in the run folder."""
    sys.stdout.write(f"hello from rank {_rank()}\n")
    sys.stderr.write(f"warning of rank {_rank()}\n")
    (run_dir / f"seen{_rank()}.json").write_text(json.dumps(dict(os.environ)))


def leave_a_pool(run_dir: Path) -> None:
    """A compiler and many a dataset do."""
    _pools.append(ThreadPoolExecutor(1))
    _pools[0].submit((run_dir / "worked").touch).result()
    atexit.register((run_dir / "ended").touch)


def fail_on_rank_1(run_dir: Path) -> None:
    """Rank 1 raises while the others wait for it."""
    if _rank() == 1:
        raise ValueError("the cause of it all")
    time.sleep(600)


def refuse(run_dir: Path) -> None:
    """Every rank refuses with an error raised on purpose."""
    raise LayoutError("tensor_parallel_size is 3: no.")


def die(run_dir: Path) -> None:
    """Rank 1 is ended by a signal without a word."""
    if _rank() == 1:
        os.kill(os.getpid(), 9)
    time.sleep(600)


def hang(run_dir: Path) -> None:
    """Never ends; says where it lives."""
    (run_dir / f"pid{_rank()}").write_text(str(os.getpid()))
    time.sleep(600)


def hang_deaf(run_dir: Path) -> None:
    """Never ends and does not react to what it can ignore, like a rank blocked in native code."""
    import signal

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    hang(run_dir)
