"""A step whose `srun` waits for a node that is gone: it is ended, and the point goes on instead of failing."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from hybrid_strategy.errors import PreemptedError
from hybrid_strategy.launch import slurm_step
from hybrid_strategy.launch.failures import record
from hybrid_strategy.sweeping.causes import lost_a_node

SAID = """srun: error: node3: task 0: Exited with exit code 1
srun: launch/slurm: _step_signal: Terminating StepId=1.0
"""


def _started(code: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", code])


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm_step, "_POLL_SECONDS", 0.05)
    monkeypatch.setattr(slurm_step, "_SHUTDOWN_SECONDS", 0.3)
    monkeypatch.setattr(slurm_step, "_PATIENCE_SECONDS", 1.5)


@pytest.mark.parametrize(("end", "code"), [("sys.exit(3)", 3), ("pass", 0), ("os.kill(os.getpid(), 15)", 143)])
def test_the_exit_code_is_that_of_the_step(end: str, code: int, tmp_path: Path) -> None:
    assert slurm_step.wait(_started(f"import os, sys; {end}"), tmp_path) == code


def test_a_step_without_a_failure_may_take_its_time(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    record(tmp_path / "logs", 0, PreemptedError("stopped by SIGTERM"))  # its peers may be saving
    assert slurm_step.wait(_started("import time; time.sleep(2.5)"), tmp_path) == 0


@pytest.mark.parametrize(("obeys", "code"), [(True, 143), (False, 137)])
def test_after_a_failure_the_step_is_ended(obeys: bool, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """First what is left of it; where `srun` waits for a node that is gone even then, it is not waited for."""
    (tmp_path / "logs").mkdir()
    record(tmp_path / "logs", 0, RuntimeError("Connection closed by peer"))
    step, started = _started("import time; time.sleep(60)"), time.monotonic()
    told = []
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setattr(slurm_step, "kill_step", lambda job: (told.append(job), step.terminate() if obeys else None))
    assert slurm_step.wait(step, tmp_path) == code
    assert told == ["7"]
    assert time.monotonic() - started < 10


def test_a_node_is_gone_where_ranks_lost_a_peer_of_whose_end_nobody_knows(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    assert not lost_a_node(tmp_path, 2, "")
    record(logs, 0, RuntimeError("pair.cc:553] Connection closed by peer [198.18.78.4]:58559"))
    assert lost_a_node(tmp_path, 2, SAID)
    assert not lost_a_node(tmp_path, 2, SAID + "srun: error: node4: task 1: Killed\n")
    record(logs, 1, ValueError("made to fail"))
    assert not lost_a_node(tmp_path, 2, SAID)
