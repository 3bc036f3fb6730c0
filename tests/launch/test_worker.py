"""The entry of a rank, piece by piece; whole runs of it are in `test_local`."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from pathlib import Path

from hybrid_strategy.launch import worker


def test_the_collector_sleeps_while_a_rank_imports_and_no_longer() -> None:
    try:
        assert worker._imported("json:loads") is json.loads
        assert gc.isenabled()
        assert gc.get_freeze_count() > 0, "what was imported is looked at again and again"
    finally:
        gc.unfreeze()


def test_a_rank_ends_where_a_pool_of_threads_is_left_open(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    command = [sys.executable, "-m", "hybrid_strategy.launch.worker", "tests.launch.targets:leave_a_pool", str(tmp_path)]
    ended = subprocess.run(command, timeout=60, env={**os.environ, "RANK": "0"}, capture_output=True, check=False)
    assert ended.returncode == 0
    assert (tmp_path / "worked").exists()
    assert (tmp_path / "ended").exists(), "what is registered to run at the end did not"
