"""B55, kind of fault: who starts the processes is guessed from a job's name or from variables that a shell has inherited.

The live step decides; torchrun wins over it; what was chosen and why is said once; an environment that the user gives stays.
"""

from __future__ import annotations

import logging

import lightning.pytorch as pl
import pytest
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment

from hybrid_strategy import HybridParallelStrategy

ALLOCATION = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "1", "SLURM_NNODES": "1", "SLURM_NODELIST": "node1"}
STEP = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_STEP_NUM_TASKS": "1"}
TORCHRUN = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "0",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29501",
    "TORCHELASTIC_RUN_ID": "x",
}


def trainer(devices: int = 2, **strategy: object) -> pl.Trainer:
    return pl.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=HybridParallelStrategy(**strategy),  # type: ignore[arg-type]
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def environment(monkeypatch: pytest.MonkeyPatch, *variables: dict[str, str]) -> None:
    for each in variables:
        for name, value in each.items():
            monkeypatch.setenv(name, value)


@pytest.mark.parametrize("name", ["vscode", "jupyter", "bash", "interactive", "train"])
@pytest.mark.parametrize("step", [{}, STEP], ids=["no step", "a shell's step"])
def test_a_shell_in_an_allocation_starts_its_own_processes(
    name: str, step: dict[str, str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    environment(monkeypatch, ALLOCATION, step, {"SLURM_JOB_NAME": name})
    with caplog.at_level(logging.INFO):
        made = trainer()
    assert isinstance(made.strategy.cluster_environment, LightningEnvironment)
    assert made.strategy.launcher is not None
    if name not in ("bash", "interactive"):  # there Lightning itself does not think of Slurm
        assert "2 processes are started here" in caplog.text


@pytest.mark.parametrize("name", ["vscode", "train"])
def test_the_tasks_of_a_step_are_the_ranks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = {"SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_JOB_NAME": name}
    environment(monkeypatch, ALLOCATION, STEP, tasks)
    made = trainer()
    assert isinstance(made.strategy.cluster_environment, SLURMEnvironment)
    assert made.strategy.launcher is None


def test_torchrun_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    environment(monkeypatch, ALLOCATION, STEP, TORCHRUN, {"SLURM_JOB_NAME": "train"})
    assert isinstance(trainer().strategy.cluster_environment, TorchElasticEnvironment)


def test_what_the_user_gives_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    environment(monkeypatch, ALLOCATION, STEP, {"SLURM_JOB_NAME": "train"})
    given = LightningEnvironment()
    assert trainer(cluster_environment=given).strategy.cluster_environment is given
