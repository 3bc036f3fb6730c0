"""Hydra's submitit launcher under `hybrid train -m`, with the limits that `slurm/README.md` names: who fails is seen."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
pytest.importorskip("hydra_plugins.hydra_submitit_launcher", reason="pip install 'hybrid-strategy[submitit]'")

BASE = (
    "model._target_=tests.cli.own_module.OwnModule",
    "data._target_=tests.cli.own_module.OwnData",
    "trainer=cpu",
    "trainer.max_steps=3",
    "strategy=single",
    "logger=csv",
    "name=s",
)


def test_a_failed_point_is_seen_and_the_other_has_its_result(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "HYBRID_STRATEGY_CACHE": str(tmp_path / "cache")}
    launcher = ("hydra/launcher=submitit_local", "hydra.launcher.timeout_min=5", "hydra.launcher.tasks_per_node=1")
    command = [sys.executable, "-m", "hybrid_strategy.cli.main", "train", "-m", *launcher, *BASE, "model.fail_rank=-1,0"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 5, done.stdout + done.stderr
    assert done.stderr.count("ValueError: made to fail") == 1
    folders = sorted((tmp_path / "outputs/sweeps/s").glob("[0-9]"))
    assert len(folders) == 2
    found = [json.loads(path.read_text())["steps"] for folder in folders for path in folder.glob("result.json")]
    assert found == [3]
