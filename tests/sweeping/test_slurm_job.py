"""What the batch script makes of an attempt that has ended, where Slurm does not answer: state and reason are still told."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from hybrid_strategy.config.storage import PREEMPTED_FILE, RESULT_FILE
from hybrid_strategy.errors import PreemptedError, RunError
from hybrid_strategy.files import write_json
from hybrid_strategy.launch.failures import record
from hybrid_strategy.sweeping.attempts import read_state, write_state
from hybrid_strategy.sweeping.points import POINT_FILE
from hybrid_strategy.sweeping.session import Session
from hybrid_strategy.sweeping.settings import SlurmSettings
from hybrid_strategy.sweeping.slurm import commands
from hybrid_strategy.sweeping.slurm.job import end_job
from hybrid_strategy.sweeping.slurm.runner import SlurmRunner
from hybrid_strategy.sweeping.slurm.submission import Submission
from tests.support.sweep_points import ended_point

LOST = RuntimeError("pair.cc:553] Connection closed by peer [198.18.78.4]:58559")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A point of two ranks that runs, in a job of a Slurm that cannot be asked."""
    (tmp_path / "empty.conf").write_text("")
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "empty.conf"))
    point = ended_point(tmp_path, "p", {}, 2.0)
    (point.folder / RESULT_FILE).unlink()
    (point.folder / "logs").mkdir()
    write_json(point.folder / POINT_FILE, point.to_dict())
    write_json(point.folder / "state.json", {"state": "running", "attempt": 1, "job": "1"})
    return point.folder


def _result(folder: Path) -> tuple[str, str]:
    found = json.loads((folder / RESULT_FILE).read_text())
    return found["state"], found["reason"]


@pytest.mark.parametrize(
    ("signal", "state", "said"),
    [("SIGTERM", "preempted", "stopped by SIGTERM"), ("SIGUSR1", "timeout", "it reached its time limit")],
)
def test_a_signal_before_training_is_no_failure(folder: Path, signal: str, state: str, said: str) -> None:
    record(folder / "logs", 1, LOST)
    record(folder / "logs", 0, PreemptedError(f"stopped by {signal} before training began"))
    assert end_job(folder, 75) == 75
    found, reason = _result(folder)
    assert found == state
    assert reason.startswith(f"{said} before training began; it could not be put back into the queue")


def test_a_node_that_was_reset_is_no_failure_of_the_rank_that_lost_it(folder: Path) -> None:
    record(folder / "logs", 0, LOST)
    assert end_job(folder, 137) == 75
    assert _result(folder)[1].startswith("a node failed; it could not be put back")


def test_what_a_rank_raises_is_the_cause(folder: Path) -> None:
    record(folder / "logs", 0, LOST)
    record(folder / "logs", 1, ValueError("made to fail"))
    assert end_job(folder, 1) == 1
    assert _result(folder) == ("failed", "rank 1: ValueError: made to fail")


def _runner() -> tuple[SlurmRunner, io.StringIO]:
    out = io.StringIO()
    settings = SlurmSettings(wait=False, poll_seconds=0.01)
    return SlurmRunner(settings, Session(Console(file=out, width=200), folder=Path("/s"))), out


def test_a_point_whose_job_is_ending_is_submitted_after_that(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (point, other) = (ended_point(folder, name, {}, 2.0, state="cancelled", reason="cancelled") for name in ("a", "b"))
    for each, job in ((point, "5_0"), (other, "4")):
        write_state(each.folder, replace(read_state(each.folder), job=job))
    answers = [{"5_0": ("COMPLETING", "None")}] * 4
    monkeypatch.setattr(commands, "queue", lambda jobs: answers.pop() if answers and "5_0" in jobs else {})
    submitted: list[str] = []
    monkeypatch.setattr(Submission, "submit", lambda self, points: submitted.extend(each.name for each in points))
    runner, out = _runner()
    runner.run([point, other], lambda: None)
    assert submitted == ["a", "b"]
    assert not answers
    assert out.getvalue() == "waiting for jobs that are ending: a\n"


def test_a_job_that_does_not_end_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    point = ended_point(folder, "a", {}, 2.0, state="cancelled", reason="cancelled")
    write_state(point.folder, replace(read_state(point.folder), job="5"))
    monkeypatch.setattr(commands, "queue", lambda jobs: {"5": ("COMPLETING", "None")})
    monkeypatch.setattr("hybrid_strategy.sweeping.slurm.runner._ENDING_SECONDS", 0.05)
    with pytest.raises(RunError, match="a: the job before is still ending"):
        _runner()[0].run([point], lambda: None)


@pytest.mark.parametrize(("signal", "state"), [("SIGUSR1", "timeout"), ("SIGTERM", "preempted")])
def test_a_saved_step_is_told(folder: Path, signal: str, state: str) -> None:
    write_json(folder / PREEMPTED_FILE, {"step": 7, "signal": signal})
    assert end_job(folder, 75) == 75
    found, reason = _result(folder)
    assert found == state
    assert "saved at step 7" in reason
