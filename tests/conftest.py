"""What every test can count on: no launcher's variables, no way out to W&B, and a cluster only where one is up."""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

_CLUSTER = Path(__file__).resolve().parents[1] / "slurm" / "dev-cluster"
_KEPT = {"SLURM_CONF"}
_LAUNCHERS = ("SLURM_", "TORCHELASTIC_", "WANDB_", "PL_")
_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")

# inside a Slurm job, under torchrun or with a W&B key set the tests would be other tests
for _name in [each for each in os.environ if each in _RANKS or each.startswith(_LAUNCHERS)]:
    if _name not in _KEPT:
        del os.environ[_name]

gc.disable()  # what is imported for the tests stays: a fifth of the time of collecting them would go into looking at it


def _of_ranks() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name in _RANKS or name.startswith("TORCHELASTIC_")}


@pytest.fixture(autouse=True)
def nothing_stays_in_the_environment() -> Iterator[None]:
    """What starts processes later would take them for ranks of a run that has ended, and wait for the others for ever."""
    yield
    left = _of_ranks()
    for name in left:
        del os.environ[name]
    assert not left, f"the test leaves variables of ranks in the environment: {left}"


@pytest.fixture(autouse=True)
def no_process_group_stays() -> Iterator[None]:
    """What comes later in this process would take itself for a rank: Lightning warns, losses are averaged, files shared."""
    yield
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()
        pytest.fail("the test leaves a process group behind: end it with the trainer's or the pool's own teardown")


def pytest_collection_finish() -> None:
    """From here on there is garbage."""
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips tests of the cluster where none is up."""
    marked = [item for item in items if item.get_closest_marker("cluster")]
    if marked and not _cluster_is_up():
        skip = pytest.mark.skip(reason="the Slurm development cluster is not up: slurm/dev-cluster up (needs root)")
        for item in marked:
            item.add_marker(skip)


def _cluster_is_up() -> bool:
    if not os.environ.get("SLURM_CONF") or shutil.which("sbatch") is None or not hasattr(os, "geteuid") or os.geteuid():
        return False
    return subprocess.run([_CLUSTER, "status"], capture_output=True, check=False).returncode == 0
