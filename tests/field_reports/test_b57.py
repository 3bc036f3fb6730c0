"""B57, kind of fault: a job that is started again is in a new folder, or at the beginning, or always at the same checkpoint.

The folder follows from the job and is made once; each attempt goes on from the newest whole checkpoint, in the same W&B run.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from hybrid_strategy.checkpoint.digests import read_digest
from hybrid_strategy.checkpoint.manifest import write_manifest
from hybrid_strategy.cli import point as command
from hybrid_strategy.config.storage import read_config
from hybrid_strategy.sweeping.attempts import read_state
from hybrid_strategy.sweeping.metrics import read_rows
from hybrid_strategy.sweeping.points import read_point

OVERRIDES = ("model=llama_tiny", "trainer=cpu", "strategy=single", "cluster.devices=1", "logger=csv_wandb")


def _checkpoint(folder: Path, step: int) -> Path:
    made = folder / "checkpoints" / f"preempted-step{step:06}.ckpt"
    made.mkdir(parents=True)
    (made / "meta.json").write_text("{}")
    write_manifest(made, {"meta.json": read_digest(made / "meta.json")})
    return made


def _start(folder: Path, restarts: int, monkeypatch: pytest.MonkeyPatch) -> tuple[str | None, str]:
    """What the attempt resumes from, and its W&B run."""
    monkeypatch.setenv("SLURM_RESTART_COUNT", str(restarts))
    assert command.main(["prepare", str(folder), *OVERRIDES]) == 0
    assert command.main(["begin", str(folder)]) == 0
    config = read_config(folder)
    return config.resume, str(config.logger["wandb"]["id"])


def test_the_same_folder_the_newest_checkpoint_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "7"
    resume, run = _start(folder, 0, monkeypatch)
    assert resume is None
    digest = read_point(folder)
    first = _checkpoint(folder, 10)
    (folder / "metrics.csv").write_text("step,train_loss\n0,3\n5,2.5\n12,2.4\n")
    assert _start(folder, 1, monkeypatch) == (str(first), run)
    (folder / "metrics.csv").write_text("step,train_loss\n10,2.3\n15,2.2\n")
    second = _checkpoint(folder, 20)
    assert _start(folder, 2, monkeypatch) == (str(second), run)
    (second / "meta.json").write_text("half")
    assert _start(folder, 3, monkeypatch) == (str(first), run), "one that is damaged is passed over"
    assert [row["step"] for row in read_rows(folder)] == ["0", "5", "10", "15"]
    assert (read_state(folder).attempt, read_state(folder).requeues) == (4, 3)
    assert read_point(folder) == digest
