"""Stands for the process of a point: no torch, and it does what its point's seed says."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path

from hybrid_strategy.checkpoint.digests import read_digest
from hybrid_strategy.checkpoint.manifest import write_manifest
from hybrid_strategy.errors import LayoutError
from hybrid_strategy.launch import failures, parent_death
from hybrid_strategy.launch.job import log_path

OK, RAISES, OUT_OF_MEMORY, HANGS, DEAF, DIES, REFUSES, SAVES = range(100, 108)


def _fail(folder: Path, rank: int, error: BaseException) -> None:
    def work() -> None:
        raise error

    try:
        work()
    except BaseException as caught:
        failure = failures.record(folder / "logs", rank, caught)
    log_path(folder / "logs", rank).write_text(failure.traceback)
    sys.stderr.write(f"{failure.traceback}rank {rank} failed\n")
    sys.exit(failure.exit_code)


def main(folder: Path) -> None:
    """Does what the seed says."""
    kind = json.loads((folder / "point.json").read_text())["facts"]["seed"]
    (folder / "logs").mkdir(exist_ok=True)
    (folder / "environment.json").write_text(json.dumps(dict(os.environ)))
    (folder / "pid").write_text(str(os.getpid()))
    (folder / "status.json").write_text(json.dumps({"step": 7, "total_steps": 10, "loss": 2.5}))
    sys.stdout.write("a word\n")
    if kind == RAISES:
        _fail(folder, 1, ValueError("made to fail"))
    elif kind == OUT_OF_MEMORY:
        _fail(folder, 0, RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"))
    elif kind == REFUSES:
        _fail(folder, 0, LayoutError("sharding is 'zero1': no."))
    elif kind == DIES:
        sys.stderr.write(f"rank 1 ended by SIGKILL (often: out of memory) without a traceback; log: {folder}\n")
        sys.exit(1)
    elif kind in (HANGS, DEAF):
        if kind == DEAF:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(600)
    elif kind == SAVES and not (folder / "checkpoints").exists():
        checkpoint = folder / "checkpoints" / "preempted-step000007.ckpt"
        checkpoint.mkdir(parents=True)
        (checkpoint / "meta.json").write_text("{}")
        write_manifest(checkpoint, {"meta.json": read_digest(checkpoint / "meta.json")})
        damaged = checkpoint.with_name("preempted-step000008.ckpt")
        shutil.copytree(checkpoint, damaged)
        (damaged / "meta.json").write_text("")
        (folder / "metrics.csv").write_text("step,train_loss\n0,3.0\n5,2.5\n")
        (folder / "preempted.json").write_text(json.dumps({"step": 7}))
        sys.exit(75)
    elif kind == SAVES:
        (folder / "metrics.csv").write_text("step,train_loss\n7,2.4\n9,2.0\n")
    (folder / "result.json").write_text(json.dumps({"steps": 10, "last_validation_loss": kind / 100, "tokens_per_second": 50.0}))


if __name__ == "__main__":
    parent_death.guard()
    main(Path(sys.argv[2]))
