"""The examples run as their first lines say."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.ranks import free_port

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
PYTHON = (sys.executable,)
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def _run(folder: Path, launcher: tuple[str, ...], script: str, *arguments: str) -> str:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "MASTER_PORT": str(free_port())}
    found = subprocess.run(
        [*launcher, str(EXAMPLES / script), *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=170,
    )
    assert found.returncode == 0, found.stderr
    return found.stdout


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [PYTHON, TORCHRUN], ids=["python", "torchrun"])
def test_plain_lightning(launcher: tuple[str, ...], tmp_path: Path):
    (line,) = [each for each in _run(tmp_path, launcher, "plain_lightning.py").splitlines() if each.startswith("val_loss ")]
    assert float(line.split()[1]) < 0.6


@pytest.mark.slow
def test_string_name(tmp_path: Path):
    assert "trained 4 steps on 2 processes" in _run(tmp_path, PYTHON, "string_name.py")


@pytest.mark.slow
def test_hydra_app(tmp_path: Path):
    assert "tensor_parallel_size: 2" in _run(tmp_path, PYTHON, "hydra_app/app.py", "strategy=tp2", "--cfg", "job")
    output = _run(tmp_path, TORCHRUN, "hydra_app/app.py", "strategy=pp2", "devices=2")
    assert "trained 10 steps with HybridParallelStrategy" in output
