"""B54, kind of fault: ranks are counted by what was asked for, not by what runs, and some wait for those that never come.

The live step counts. A step of another shape than the layout is refused on every task, with the lines of the script to change.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment

from hybrid_strategy.errors import ConfigError
from hybrid_strategy.launch.slurm_rank import check_world, rank_variables
from hybrid_strategy.strategy.slurm_world import judged

TASK = {"SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_STEP_ID": "0"}


@pytest.mark.parametrize(
    ("environment", "world", "local"),
    [
        ({"SLURM_NTASKS": "1", "SLURM_NTASKS_PER_NODE": "2", "SLURM_TASKS_PER_NODE": "1"}, "1", "1"),
        ({"SLURM_NTASKS": "8", "SLURM_TASKS_PER_NODE": "4(x2)"}, "8", "4"),
        (
            {
                "SLURM_NTASKS": "8",
                "SLURM_TASKS_PER_NODE": "4(x2)",
                "SLURM_STEP_NUM_TASKS": "4",
                "SLURM_STEP_TASKS_PER_NODE": "4",
            },
            "4",
            "4",
        ),
        ({"SLURM_TASKS_PER_NODE": "2"}, "2", "2"),
    ],
)
def test_the_step_counts_not_the_job(environment: dict[str, str], world: str, local: str) -> None:
    found = rank_variables({**TASK, **environment})
    assert (found["WORLD_SIZE"], found["LOCAL_WORLD_SIZE"], found["RANK"]) == (world, local, "1")


def test_nodes_with_different_numbers_of_tasks_are_refused() -> None:
    with pytest.raises(ConfigError, match="every node must have the same number of tasks"):
        rank_variables({**TASK, "SLURM_TASKS_PER_NODE": "4,2"})


def test_a_process_outside_of_a_step_is_refused() -> None:
    with pytest.raises(ConfigError, match="Start the ranks with srun"):
        rank_variables({"SLURM_NTASKS": "4"})


def test_the_lines_to_change_are_named() -> None:
    with pytest.raises(ConfigError, match=r"Set #SBATCH --nodes=2 --ntasks-per-node=4"):
        check_world({"num_nodes": 2, "devices": 4}, {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"})


def test_two_tasks_of_a_world_of_four_leave_at_once(tmp_path: Path) -> None:
    """Real processes: each says so by itself, none waits for the two that are not there."""
    (tmp_path / "plan.json").write_text(json.dumps({"num_nodes": 1, "devices": 4}))
    command = [sys.executable, "-m", "hybrid_strategy.launch.slurm_rank", "nowhere:nothing", str(tmp_path)]
    started, processes = time.monotonic(), []
    for rank in ("0", "1"):
        variables = {"SLURM_PROCID": rank, "SLURM_LOCALID": rank, "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2"}
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **variables}
        processes.append(subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True))
    for rank, process in enumerate(processes):
        assert "Set #SBATCH --nodes=1 --ntasks-per-node=4" in process.communicate(timeout=30)[1]
        assert process.returncode == 1
        assert (tmp_path / f"logs/rank{rank}.error.json").exists()
    assert time.monotonic() - started < 30


def test_a_trainer_in_a_step_of_another_size_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**TASK, "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2", "SLURM_STEP_NUM_TASKS": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"4 processes, 2 tasks are running.*Set #SBATCH --nodes=1 --ntasks-per-node=4"):
        judged(SLURMEnvironment(), num_nodes=1, devices=4)


def test_a_step_smaller_than_its_job_is_a_world_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**TASK, "SLURM_NTASKS": "8", "SLURM_NTASKS_PER_NODE": "4", "SLURM_STEP_NUM_TASKS": "4"}.items():
        monkeypatch.setenv(name, value)
    found = judged(SLURMEnvironment(auto_requeue=False), num_nodes=1, devices=4)
    assert isinstance(found, SLURMEnvironment)
    assert (found.world_size(), found.auto_requeue) == (4, False)
