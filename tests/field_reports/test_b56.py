"""B56, kind of fault: two owners of one signal; the whole array is put back; the job is put back before the state is safe.

Ours: `scontrol requeue <array>_<task>` once, by one process, after the save. Here the batch script does it, with a `scontrol`
that notes what it is asked; ranks: `tests/strategy/test_saving_callbacks.py`, a real Slurm: `tests/cluster/test_slurm.py`.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hybrid_strategy.checkpoint import stop_request
from hybrid_strategy.cli import point as command
from hybrid_strategy.sweeping.attempts import read_state


@pytest.fixture
def called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the `scontrol` on PATH notes its arguments and whether what was saved is there."""
    noted = tmp_path / "called"
    tool = tmp_path / "bin" / "scontrol"
    tool.parent.mkdir()
    tool.write_text(f'#!/bin/sh\necho "$@" >> {noted}\nls {tmp_path}/run/preempted.json >> {noted}\nexit 0\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:/usr/bin:/bin")
    variables = {"SLURM_JOB_ID": "71", "SLURM_ARRAY_JOB_ID": "70", "SLURM_ARRAY_TASK_ID": "3", "SUBMITIT_PREEMPT_SIGNAL": "USR2"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return noted


def _stopped(folder: Path, restarts: int, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setenv("SLURM_RESTART_COUNT", str(restarts))
    assert command.main(["prepare", str(folder), "model=llama_tiny", "trainer=cpu", "strategy=single", "cluster.devices=1"]) == 0
    if command.main(["begin", str(folder)]):
        return 1
    (folder / "preempted.json").write_text(json.dumps({"step": 7, "signal": "SIGTERM"}))
    return command.main(["end", str(folder), "143"])


def test_one_task_of_the_array_once_after_the_save(called: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "run"
    assert _stopped(folder, 0, monkeypatch) == 75
    assert called.read_text().splitlines() == ["requeue 70_3", f"{folder}/preempted.json"]
    state = read_state(folder)
    assert (state.state, state.reason) == ("pending", "stopped by SIGTERM, saved at step 7; put back into the queue")
    assert not (folder / "result.json").exists()


def test_a_node_that_fails_is_no_failure_of_the_point(called: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The script on the other node lives long enough to see `srun` killed; what Slurm says of the step tells why."""
    folder = tmp_path / "run"
    monkeypatch.setenv("SLURM_RESTART_COUNT", "0")
    assert command.main(["prepare", str(folder), "model=llama_tiny", "trainer=cpu", "strategy=single", "cluster.devices=1"]) == 0
    assert command.main(["begin", str(folder)]) == 0
    due = "DUE TO NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS"
    (folder / "slurm").mkdir()
    (folder / "slurm/batch.log").write_text(
        f"=== point x\nslurmstepd-n3: error: *** STEP 3.0 ON n3 CANCELLED AT 2026-11-30T02:50 {due} ***\n"
    )
    assert command.main(["end", str(folder), "137"]) == 75
    assert read_state(folder).reason == "a node failed; put back into the queue"
    assert called.read_text().startswith("requeue 70_3")


def test_after_so_many_times_it_is_over(called: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "run"
    assert _stopped(folder, 10, monkeypatch) == 75
    assert not called.exists()
    assert read_state(folder).state == "preempted"
    assert _stopped(folder, 11, monkeypatch) == 1, "put back by somebody else once more than allowed"
    assert read_state(folder).reason == "it was put back into the queue 11 times, max_requeues is 10"


def test_our_signals_are_those_the_script_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever signal another launcher speaks of: who starts the ranks says what they listen to."""
    monkeypatch.setenv(stop_request.SIGNALS_VARIABLE, "USR1,USR2,TERM")
    assert [each.name for each in stop_request.signals_to_hear()] == ["SIGUSR1", "SIGUSR2", "SIGTERM"]
