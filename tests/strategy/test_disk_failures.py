"""Disks that are full or read-only: every rank says the same, the checkpoint before is intact, the run does as set."""

from __future__ import annotations

import os
import subprocess
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.demos.boring_classes import BoringModel

from hybrid_strategy import HybridParallelStrategy
from hybrid_strategy.checkpoint import folder as folders
from hybrid_strategy.checkpoint import saving
from hybrid_strategy.checkpoint.content import CheckpointContent
from hybrid_strategy.checkpoint.pieces import Piece
from hybrid_strategy.checkpoint.saving import SaveOptions
from hybrid_strategy.checkpoint.search import search
from hybrid_strategy.checkpoint.verify import read_meta
from hybrid_strategy.errors import CheckpointError
from hybrid_strategy.strategy.checkpoint_writer import CheckpointWriter
from tests.strategy.test_saving_callbacks import Savers
from tests.support.ranks import run_ranks
from tests.support.resuming import Resumed, run, run_here

EVERY_STEP = Savers(every_n_train_steps=1, save_top_k=-1, filename="{step}")
CASE = Resumed("", batch_size=2, trainer={"max_steps": 4}, callbacks=EVERY_STEP)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system that holds two checkpoints and not three, where mounting is allowed."""
    run(replace(CASE, folder=str(tmp_path / "measured"), trainer={"max_steps": 1}))
    size = sum(each.stat().st_size for each in (tmp_path / "measured" / "step=1.ckpt").iterdir())
    small = tmp_path / "small"
    small.mkdir()
    options = f"size={int(2.5 * size)}"
    if subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(small)], capture_output=True).returncode:
        pytest.skip("a full or read-only disk needs a file system of its own, and mounting a tmpfs needs root")
    yield small
    subprocess.run(["umount", str(small)], check=True)


def ended(case: Resumed, checked: bool) -> dict[str, Any]:
    """How the run ends; `checked`: it looks for space before it writes."""
    check, slack, error = folders.check_space, saving._SLACK_BYTES, ""
    saving._SLACK_BYTES = 0  # larger than these checkpoints
    if not checked:
        folders.check_space = lambda *_: None
    record = {}
    try:
        record = run_here(case)
    except CheckpointError as raised:
        error = str(raised)
    finally:
        folders.check_space, saving._SLACK_BYTES = check, slack
    return {"error": error, "steps": [event[3] for event in record.get("events", []) if event[0] == "batch"]}


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("checked", [True, False])
@pytest.mark.parametrize("way", ["raise", "warn"])
def test_a_full_disk(way: str, checked: bool, asynchronous: bool, small_disk: Path) -> None:
    strategy = {"asynchronous_checkpoint": asynchronous, "checkpoint_error": way}
    case = replace(CASE, folder=str(small_disk), strategy=strategy)
    first, second = run_ranks(ended, 2, case, checked, process_group=False)
    assert first == second
    assert first["steps"] == ([] if way == "raise" else [1, 2, 3, 4])
    if way == "raise":
        assert ("does not fit" if checked else "No space left on device") in first["error"]
    found = search(small_disk)
    assert found.path is not None
    assert not found.skipped  # nothing half-written is left
    assert read_meta(found.path)["global_step"] <= 2
    assert {each.name for each in small_disk.iterdir()} == {"last", "step=1.ckpt", "step=2.ckpt"}
    subprocess.run(["mount", "-o", "remount,size=64m", str(small_disk)], check=True)
    run(replace(case, checkpoint=found.path.name, trainer={"max_steps": 3}), 2)
    assert read_meta(small_disk / "step=3.ckpt")["global_step"] == 3


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_read_only_folder(asynchronous: bool, small_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,size=64m", str(small_disk)], check=True)
    run(replace(CASE, folder=str(small_disk), trainer={"max_steps": 1}), 2)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    strategy = {"asynchronous_checkpoint": asynchronous}
    case = replace(CASE, folder=str(small_disk), strategy=strategy, checkpoint="step=1.ckpt")
    first, second = run_ranks(ended, 2, case, True, process_group=False)
    assert first == second
    assert "Read-only file system" in first["error"]
    warned, _ = run_ranks(ended, 2, replace(case, strategy={**strategy, "checkpoint_error": "warn"}), True, process_group=False)
    assert warned["steps"] == [2, 3, 4]


class _SavesAndFails(Callback):
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        trainer.save_checkpoint(os.path.join(trainer.default_root_dir, "saved"))
        raise ValueError("made to fail")


def _fails_while_saving(folder: str) -> tuple[str, list[str]]:
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
    strategy = HybridParallelStrategy(asynchronous_checkpoint=True)
    trainer = pl.Trainer(**quiet, devices=1, default_root_dir=folder, strategy=strategy, callbacks=[_SavesAndFails()])
    with mock.patch.object(saving, "write_items", side_effect=OSError("no space")), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with pytest.raises(ValueError) as caught:
            trainer.fit(BoringModel())
    return str(caught.value), [str(each.message) for each in told if "no space" in str(each.message)]


def test_an_error_of_the_run_is_not_hidden_by_one_of_its_last_save(tmp_path: Path) -> None:
    error, told = run_ranks(_fails_while_saving, 1, str(tmp_path), process_group=False)[0]
    assert error == "made to fail"
    assert "could not write it. OSError: no space" in told[0]


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.filterwarnings("ignore:.*goes on without this checkpoint", "ignore:.*could not be removed. NotADirectoryError")
def test_what_a_failed_save_would_have_replaced_goes_with_what_replaces_that(asynchronous: bool, tmp_path: Path) -> None:
    """Lightning speaks of it once; if it stayed, a disk with room for two checkpoints would never hold a new one again."""
    writer, content = CheckpointWriter(asynchronous, "wait", "warn", is_first=True), {"model.w": Piece.whole("w", torch.ones(3))}
    (tmp_path / "2").write_text("a file, in whose folder nothing can be written")
    for place, replaced in (("1", None), ("2/within", "1"), ("other", None), ("3", "2/within"), ("4", "3")):
        writer.save(tmp_path / place, CheckpointContent(dict(content)), SaveOptions())
        if replaced:
            writer.remove(tmp_path / replaced)
        writer.finish()
        assert (tmp_path / "1").is_dir() == (place in ("1", "2/within", "other"))
    writer.close()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["2", "4", "last", "other"]
