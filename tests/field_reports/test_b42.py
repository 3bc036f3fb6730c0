"""B42, kind of fault: a save that did not happen looks like one that did, or is waited for for ever.

Whatever stops a save on whichever rank, all ranks say so within seconds, the checkpoint before is there bit for bit, and what
resumes takes a whole one and says which.
"""

from __future__ import annotations

import errno
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from hybrid_strategy.checkpoint import folder as folders
from hybrid_strategy.checkpoint import saving
from hybrid_strategy.checkpoint.loading import load_checkpoint, saved_names
from hybrid_strategy.checkpoint.pieces import Piece
from hybrid_strategy.checkpoint.search import committed, search
from hybrid_strategy.errors import CheckpointError
from tests.support.ranks import run_ranks
from tests.support.resuming import Resumed, run, run_here

CASE = Resumed("", batch_size=2, trainer={"max_epochs": 1, "limit_val_batches": 1})
FIRST = {"first": ("batch_end", 0, 1)}
BOTH = {**FIRST, "second": ("batch_end", 0, 3)}


def tensors(path: Path) -> dict[str, torch.Tensor]:
    pieces = {key: Piece.whole(key, torch.empty(each.shape, dtype=each.dtype)) for key, each in saved_names(path).items()}
    load_checkpoint(path, pieces)
    return {key: piece.tensor for key, piece in pieces.items()}


@pytest.fixture
def first(tmp_path: Path) -> tuple[Path, Callable[[], bool]]:
    """A folder with one good checkpoint, and whether it is still what it was."""
    run(replace(CASE, folder=str(tmp_path), moments=FIRST), 2)
    before = tensors(tmp_path / "first")

    def intact() -> bool:
        now = tensors(tmp_path / "first")
        return now.keys() == before.keys() and all(torch.equal(now[key], before[key]) for key in before)

    return tmp_path, intact


def full_disk(*arguments: Any) -> Any:
    raise OSError(errno.ENOSPC, "No space left on device")


def no_permission(*arguments: Any) -> Any:
    raise PermissionError(errno.EACCES, "Permission denied")


FAULTS = {"blocks": (saving, "write_items", full_disk), "commit": (folders, "commit", no_permission)}


def faulty(case: Resumed, fault: str, rank: int) -> tuple[str, float]:
    """Runs with a fault on one rank; what ended it, and how long after the other rank could know."""
    import os

    where, name, function = FAULTS[fault]
    before = getattr(where, name)
    if int(os.environ["RANK"]) == rank:
        setattr(where, name, function)
    started = time.monotonic()
    try:
        run_here(case)
    except CheckpointError as error:
        return str(error), time.monotonic() - started
    finally:
        setattr(where, name, before)
    return "", 0.0


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(
    ("fault", "rank", "words"),
    [("blocks", 1, "No space left"), ("blocks", 0, "No space left"), ("commit", 0, "Permission denied")],
)
def test_a_write_that_fails_on_one_rank_ends_all(
    fault: str, rank: int, words: str, asynchronous: bool, first: tuple[Path, Callable[[], bool]]
) -> None:
    folder, intact = first
    case = replace(CASE, folder=str(folder), moments={"second": ("batch_end", 0, 3)}, checkpoint="first")
    case = replace(case, strategy={"asynchronous_checkpoint": asynchronous})
    (one, seconds), (other, _) = run_ranks(faulty, 2, case, fault, rank, process_group=False, timeout=60)
    assert one == other
    assert words in one
    assert seconds < 30
    assert [each.name for each in committed(folder)] == ["first"]
    assert intact()


@pytest.mark.parametrize("kind", ["half", "gone", "other_bit"])
def test_a_damaged_shard_is_named_and_the_one_before_is_offered(kind: str, tmp_path: Path) -> None:
    run(replace(CASE, folder=str(tmp_path), moments=BOTH), 2)
    shard = tmp_path / "second" / "__1_0.distcp"
    data = shard.read_bytes()
    shard.unlink() if kind == "gone" else shard.write_bytes(
        data[: len(data) // 2] if kind == "half" else data[:-9] + b"x" + data[-8:]
    )
    texts = run_ranks(loading, 2, replace(CASE, folder=str(tmp_path), checkpoint="second"), process_group=False, timeout=60)
    assert texts[0] == texts[1]
    assert "__1_0.distcp" in texts[0]
    assert texts[0].endswith(f"The newest good checkpoint beside it is {tmp_path / 'first'}.")
    found = search(tmp_path)
    assert found.path == tmp_path / "first"
    assert "__1_0.distcp" in found.skipped[0][1]


def loading(case: Resumed) -> str:
    try:
        run_here(case)
    except CheckpointError as error:
        return str(error)
    return ""


def test_what_a_killed_save_left_is_passed_over_by_last_and_by_a_search(first: tuple[Path, Callable[[], bool]]) -> None:
    folder, intact = first
    shutil.copytree(folder / "first", folder / "last.ckpt.partial-0badcafe")
    (folder / "last.ckpt.partial-0badcafe" / "manifest.json").unlink()
    shutil.copytree(folder / "first", folder / "second")
    (folder / "second" / "manifest.json").unlink()
    found = search(folder)
    assert found.path == folder / "first"
    assert {name for name, _ in found.skipped} == {"last.ckpt.partial-0badcafe", "second"}
    assert (folder / "last").read_text().strip() == "first"
    assert intact()
    run(replace(CASE, folder=str(folder), moments={"last.ckpt": ("batch_end", 0, 3)}, checkpoint="first"), 2)
    assert {each.name for each in committed(folder)} == {"last.ckpt", "first"}
    assert not list(folder.glob("*.partial-*"))


class OnOneRank(pl.Callback):
    """Saves inside a block for rank 0, at one of Lightning's hooks."""

    def __init__(self, hook: str, folder: str) -> None:
        self.hook, self.folder = hook, folder

    def _save(self, trainer: pl.Trainer, hook: str) -> None:
        if hook == self.hook and trainer.is_global_zero and not trainer.sanity_checking:
            trainer.save_checkpoint(f"{self.folder}/alone.ckpt")

    def on_train_batch_start(self, trainer: pl.Trainer, *arguments: Any) -> None:
        self._save(trainer, "batch_start")

    def on_train_batch_end(self, trainer: pl.Trainer, *arguments: Any) -> None:
        self._save(trainer, "batch_end")

    def on_validation_end(self, trainer: pl.Trainer, *arguments: Any) -> None:
        self._save(trainer, "validation_end")


def alone(case: Resumed, hook: str) -> tuple[str, float]:
    started = time.monotonic()
    try:
        run_here(replace(case, callbacks=lambda _: [OnOneRank(hook, case.folder)]))
    except CheckpointError as error:
        return str(error), time.monotonic() - started
    return "", 0.0


@pytest.mark.parametrize("hook", ["batch_end", "validation_end"])
@pytest.mark.parametrize("strategy", [{}, {"pipeline_parallel_size": 2, "num_microbatches": 2}])
def test_saving_on_rank_0_alone_is_refused_on_every_rank(hook: str, strategy: dict[str, Any], tmp_path: Path) -> None:
    trainer = {"max_epochs": 2, "limit_val_batches": 1, "enable_checkpointing": False}
    case = replace(CASE, folder=str(tmp_path), strategy=strategy, trainer=trainer)
    (one, seconds), (other, _) = run_ranks(alone, 2, case, hook, process_group=False, timeout=60)
    assert one == other
    assert "called on rank 0 only" in one
    assert "never inside a rank-zero block" in one
    assert seconds < 30
    assert committed(tmp_path) == []


RESUME = """
import json, sys
from pathlib import Path
from hybrid_strategy.checkpoint.search import search
found = search(Path(sys.argv[1]))
print(json.dumps([str(found.path), found.skipped]))
assert not {"torch", "lightning"} & set(sys.modules)
"""


def test_looking_for_a_good_one_needs_no_torch(first: tuple[Path, Callable[[], bool]]) -> None:
    folder, _ = first
    found = subprocess.run([sys.executable, "-c", RESUME, str(folder)], capture_output=True, text=True, check=True)
    assert json.loads(found.stdout) == [str(folder / "first"), []]
