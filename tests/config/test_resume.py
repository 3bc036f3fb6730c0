"""Which checkpoint `resume` means."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from hybrid_strategy.config.resume import find_checkpoint
from hybrid_strategy.config.settings import PathSettings, RunConfig
from hybrid_strategy.errors import ConfigError


def _checkpoint(run: Path, name: str, age_seconds: int) -> Path:
    folder = run / "checkpoints" / name
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text("{}")
    stamp = 1_700_000_000 - age_seconds
    os.utime(folder / "manifest.json", (stamp, stamp))
    return folder


def _find(tmp_path: Path, resume: str | None) -> Path | None:
    return find_checkpoint(replace(RunConfig(), name="mine", resume=resume, paths=PathSettings(output_dir=str(tmp_path))))


def test_nothing_asked_for_nothing_found(tmp_path: Path):
    assert _find(tmp_path, None) is None
    assert _find(tmp_path, "auto") is None


def test_auto_takes_the_newest_of_all_runs_of_this_name(tmp_path: Path):
    _checkpoint(tmp_path / "mine" / "run2", "step000010.ckpt", 50)
    newest = _checkpoint(tmp_path / "mine" / "run1", "step000020.ckpt", 10)
    _checkpoint(tmp_path / "other" / "run1", "step000030.ckpt", 0)
    assert _find(tmp_path, "auto") == newest


def test_a_run_folder_a_folder_of_checkpoints_and_a_checkpoint_are_understood(tmp_path: Path):
    run = tmp_path / "mine" / "run"
    _checkpoint(run, "step000010.ckpt", 50)
    newest = _checkpoint(run, "step000020.ckpt", 10)
    assert _find(tmp_path, str(run)) == _find(tmp_path, str(run / "checkpoints")) == _find(tmp_path, str(newest)) == newest


def test_what_is_not_finished_is_not_resumed(tmp_path: Path):
    run = tmp_path / "run"
    (run / "checkpoints" / "step000010.ckpt").mkdir(parents=True)
    _checkpoint(run, "step000020.ckpt.partial-abc", 0)
    with pytest.raises(ConfigError, match=r"resume is .* it holds no finished checkpoint"):
        _find(tmp_path, str(run))


def test_a_path_that_is_not_there_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="there is no such path"):
        _find(tmp_path, str(tmp_path / "nothing"))
