"""Which checkpoint `resume` means."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest

from hybrid_strategy.checkpoint.search import Found
from hybrid_strategy.config.resume import find_checkpoint
from hybrid_strategy.config.settings import PathSettings, RunConfig
from hybrid_strategy.errors import ConfigError


def _checkpoint(run: Path, name: str, age_seconds: int, meta: str = "{}") -> Path:
    folder = run / "checkpoints" / name
    folder.mkdir(parents=True)
    (folder / "meta.json").write_text(meta)
    digest = {"num_bytes": len(meta), "sha256": hashlib.sha256(meta.encode()).hexdigest()}
    body = {"format_version": 1, "created_seconds": 1_700_000_000.0 - age_seconds, "files": {"meta.json": digest}}
    own = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps({**body, "sha256": own}))
    return folder


def _find(tmp_path: Path, resume: str | None) -> Path | None:
    return _search(tmp_path, resume).path


def _search(tmp_path: Path, resume: str | None) -> Found:
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


def test_a_name_with_the_slash_of_a_metric_is_found(tmp_path: Path):
    run = tmp_path / "mine" / "run"
    _checkpoint(run, "step000010.ckpt", 50)
    newest = _checkpoint(run, "step=20-val/loss=0.5.ckpt", 10)
    assert _find(tmp_path, "auto") == _find(tmp_path, str(run)) == _find(tmp_path, str(run / "checkpoints")) == newest


def test_what_is_not_finished_is_not_resumed(tmp_path: Path):
    run = tmp_path / "run"
    (run / "checkpoints" / "step000010.ckpt").mkdir(parents=True)
    _checkpoint(run, "step000020.ckpt.partial-abc", 0)
    with pytest.raises(ConfigError, match=r"resume is .* it holds no finished checkpoint"):
        _find(tmp_path, str(run))


def test_auto_passes_over_what_holds_weights_only(tmp_path: Path):
    good = _checkpoint(tmp_path / "mine" / "run", "step000010.ckpt", 50)
    _checkpoint(tmp_path / "mine" / "run", "weights.ckpt", 10, '{"meta": {"weights_only": true}}')
    found = _search(tmp_path, "auto")
    assert found.path == good
    assert found.skipped == (("weights.ckpt", "it holds weights only, so training cannot go on from it"),)


def test_a_single_file_is_refused_and_what_to_do_with_it_said(tmp_path: Path):
    (tmp_path / "old.ckpt").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"training cannot go on from a single file.*Set strategy\.initial_weights"):
        _find(tmp_path, str(tmp_path / "old.ckpt"))


def test_a_checkpoint_that_stepped_aside_is_found(tmp_path: Path):
    """A process ended between the two renames that replace it."""
    path = _checkpoint(tmp_path / "run", "last-stopped.ckpt", 10)
    aside = path.with_name("last-stopped.ckpt.old-0badcafe")
    path.rename(aside)
    assert _find(tmp_path, str(path)) == aside
    assert _find(tmp_path, str(tmp_path / "run")) == aside


def test_a_path_that_is_not_there_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="there is no such path"):
        _find(tmp_path, str(tmp_path / "nothing"))


@pytest.mark.parametrize("damage", ["altered", "missing"])
def test_auto_passes_over_what_is_damaged_and_says_so(damage: str, tmp_path: Path):
    good = _checkpoint(tmp_path / "mine" / "run", "step000010.ckpt", 50)
    bad = _checkpoint(tmp_path / "mine" / "run", "step000020.ckpt", 10)
    (bad / "meta.json").unlink() if damage == "missing" else (bad / "meta.json").write_text("[]")
    found = _search(tmp_path, "auto")
    assert found.path == good
    ((name, why),) = found.skipped
    assert name == "step000020.ckpt"
    assert f"its file meta.json is {damage}" in why
