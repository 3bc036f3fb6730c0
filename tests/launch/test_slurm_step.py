"""A step whose `srun` waits for a node that is gone: it is ended, and the point goes on instead of failing."""

from __future__ import annotations

import signal
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
    monkeypatch.setattr(slurm_step, "_PATIENCE_SECONDS", 1.5)


@pytest.mark.parametrize(("end", "code"), [("sys.exit(3)", 3), ("pass", 0), ("os.kill(os.getpid(), 15)", 143)])
def test_the_exit_code_is_that_of_the_step(end: str, code: int, tmp_path: Path) -> None:
    assert slurm_step.wait(_started(f"import os, sys; {end}"), tmp_path) == code


def test_a_step_without_a_failure_may_take_its_time(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    record(tmp_path / "logs", 0, PreemptedError("stopped by SIGTERM"))  # its peers may be saving
    assert slurm_step.wait(_started("import time; time.sleep(2.5)"), tmp_path) == 0


def test_after_a_failure_the_step_is_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    record(tmp_path / "logs", 0, RuntimeError("Connection closed by peer"))
    started = time.monotonic()
    assert slurm_step.wait(_started("import time; time.sleep(60)"), tmp_path) == 137
    assert time.monotonic() - started < 10


def test_a_rank_leaves_when_another_has_failed_and_not_because_of_a_signal_alone(tmp_path: Path) -> None:
    """It waits where no handler of Python's runs, as for the others to come."""
    (tmp_path / "logs").mkdir()
    code = (
        "import ctypes, signal; from pathlib import Path; from hybrid_strategy.launch.slurm_rank import leave_with_the_failed\n"
        "signal.signal(signal.SIGTERM, lambda *_: None)\n"
        f"leave_with_the_failed(Path({str(tmp_path / 'logs')!r}))\n"
        "print(flush=True)\n"
        "while True: ctypes.CDLL(None).sleep(60)"
    )
    rank = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        assert rank.stdout is not None
        rank.stdout.readline()
        rank.terminate()
        time.sleep(1.5)
        assert rank.poll() is None
        record(tmp_path / "logs", 1, ValueError("made to fail"))
        assert rank.wait(10) == -signal.SIGKILL
    finally:
        rank.kill()
        rank.communicate()


def test_a_node_is_gone_where_ranks_lost_a_peer_of_whose_end_nobody_knows(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    assert not lost_a_node(tmp_path, 2, "")
    record(logs, 0, RuntimeError("pair.cc:553] Connection closed by peer [198.18.78.4]:58559"))
    assert lost_a_node(tmp_path, 2, SAID)
    assert not lost_a_node(tmp_path, 2, SAID + "srun: error: node4: task 1: Killed\n")
    record(logs, 1, ValueError("made to fail"))
    assert not lost_a_node(tmp_path, 2, SAID)
