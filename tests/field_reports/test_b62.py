"""B62, kind of fault: segments of one run that were logged offline overwrite each other, or all but one of them are lost.

Each attempt is a folder of the same W&B run, one command sends all of them, and `metrics.csv` has every step once.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from hybrid_strategy.reporting.wandb_run import WandbRunLogger
from hybrid_strategy.sweeping.closing import sync_lines
from hybrid_strategy.sweeping.metrics import merge_parts, read_rows, set_aside
from hybrid_strategy.sweeping.points import Point, Resources
from tests.support.wandb_files import history, runs

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def test_three_segments_lose_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "s" / "point"
    for number in range(3):
        if number:
            set_aside(folder, keep=True)
            time.sleep(1.1)  # the folder's name has the second in it
        logger = WandbRunLogger(save_dir=str(folder), id="run1", mode="offline")
        lines = ["step,train_loss"]
        for step in range(10 * number - (2 if number else 0), 10 * (number + 1)):  # two steps were done again after the stop
            logger.log_metrics({"train_loss": float(step)}, step=step)
            lines.append(f"{step},{step}")
        logger.finish()
        (folder / "metrics.csv").write_text("\n".join(lines) + "\n")
    merge_parts(folder)
    assert [int(row["step"]) for row in read_rows(folder)] == list(range(30))
    found = runs(folder)
    assert len(found) == 3
    assert all(run.name.endswith("-run1") for run in found)
    assert {row["trainer/global_step"] for run in found for row in history(run)} == set(range(30))
    point = Point("point", folder, (), {}, (), Resources(), {}, "d")
    (line,) = sync_lines([point], tmp_path / "s")
    assert line == f"W&B: 3 offline runs; upload with: wandb sync --append {tmp_path}/s/*/wandb/offline-run-*"
    (tmp_path / "s/point~0501-1200/wandb/offline-run-1-run0").mkdir(parents=True)
    (tmp_path / "s/point~0501-1200/wandb/offline-run-1-run0/run-run0.wandb").touch()
    (line,) = sync_lines([point], tmp_path / "s")  # what was set aside is left out
    assert line == f"W&B: 3 offline runs; upload with: wandb sync --append {tmp_path}/s/point/wandb/offline-run-*"
