"""B47, kind of fault: a failure that is handed back as a value, so that whoever looks at exit codes sees success.

The job of a point ends with a code that is not 0, its traceback is in its own log and in its result, the others are untouched.
On a real Slurm: `tests/cluster/test_slurm.py`.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hybrid_strategy.cli import point as command
from hybrid_strategy.launch import failures
from hybrid_strategy.sweeping.attempts import begin, read_state


def _prepared(folder: Path) -> Path:
    assert command.main(["prepare", str(folder), "model=llama_tiny", "trainer=cpu", "strategy=dp2", "cluster.devices=2"]) == 0
    begin(folder, job="7")
    (folder / "logs").mkdir()
    return folder


@pytest.mark.parametrize("code", [1, 143, 0])
def test_a_rank_that_raised_is_a_failed_job(code: int, tmp_path: Path) -> None:
    """Even where srun should say 0: nothing but a result makes a job a success."""
    folder = _prepared(tmp_path / "run")
    try:
        raise ValueError("made to fail")
    except ValueError as error:
        failures.record(folder / "logs", 1, error)
    assert command.main(["end", str(folder), str(code)]) != 0
    result = json.loads((folder / "result.json").read_text())
    assert (result["state"], result["rank"], result["reason"]) == ("failed", 1, "rank 1: ValueError: made to fail")
    assert read_state(folder).state == "failed"


def test_a_job_with_a_result_is_a_success(tmp_path: Path) -> None:
    folder = _prepared(tmp_path / "run")
    (folder / "result.json").write_text('{"steps": 3}')
    assert command.main(["end", str(folder), "0"]) == 0
    assert read_state(folder).state == "ok"
