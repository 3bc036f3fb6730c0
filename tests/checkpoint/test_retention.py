"""keep_last, keep_best, and what is never removed."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from hybrid_strategy.checkpoint.content import CheckpointContent
from hybrid_strategy.checkpoint.folder import point_last, read_last, remove_checkpoint
from hybrid_strategy.checkpoint.pieces import Piece
from hybrid_strategy.checkpoint.retention import Retention, prune
from hybrid_strategy.checkpoint.saving import save_checkpoint
from hybrid_strategy.checkpoint.search import search
from hybrid_strategy.errors import ConfigError
from tests.support.ranks import run_ranks

SCORES = {"a": 0.5, "b": 0.1, "c": 0.9, "d": math.nan, "e": None, "f": 0.3}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, score in SCORES.items():
        tensors = {"model.w": Piece.whole("w", torch.ones(2))}
        save_checkpoint(tmp_path / name, CheckpointContent(tensors, meta={} if score is None else {"score": score}))
    return tmp_path


def left(folder: Path) -> str:
    return "".join(sorted(each.name for each in folder.iterdir() if each.is_dir()))


@pytest.mark.parametrize(
    ("retention", "kept"),
    [
        (Retention(), "abcdef"),
        (Retention(keep_last=2), "ef"),
        (Retention(keep_last=1, keep_best=1), "bf"),
        (Retention(keep_last=1, keep_best=2, higher_is_better=True), "acf"),
        (Retention(keep_last=1, keep_best=9), "abcf"),
        (Retention(keep_last=9), "abcdef"),
    ],
)
def test_what_is_kept(folder: Path, retention: Retention, kept: str) -> None:
    removed = prune(folder, retention)
    assert left(folder) == kept
    assert removed == sorted(set("abcdef") - set(kept))


def test_what_last_names_is_kept(folder: Path) -> None:
    point_last(folder / "c")
    prune(folder, Retention(keep_last=1))
    assert left(folder) == "cf"


def test_other_things_in_the_folder_are_left_alone(folder: Path) -> None:
    (folder / "logs").mkdir()
    (folder / "hparams.yaml").write_text("x: 1")
    prune(folder, Retention(keep_last=1))
    assert (folder / "logs").is_dir()
    assert (folder / "hparams.yaml").is_file()


def prune_on_ranks(folder: str) -> list[str]:
    return prune(folder, Retention(keep_last=4))


def test_ranks_prune_once(folder: Path) -> None:
    assert run_ranks(prune_on_ranks, 2, str(folder)) == [["a", "b"]] * 2


def test_a_pointer_goes_with_what_it_names(folder: Path) -> None:
    remove_checkpoint(folder / "a")
    assert read_last(folder) == folder / "f"
    remove_checkpoint(folder / "f")
    assert not (folder / "last").exists()


def test_a_hidden_checkpoint_is_neither_pointed_to_nor_found(folder: Path) -> None:
    """Lightning's search for a learning rate saves one, and takes it away when it is done."""
    save_checkpoint(folder / ".lr_find_1.ckpt", CheckpointContent({"model.w": Piece.whole("w", torch.ones(2))}))
    assert (read_last(folder), search(folder).path) == (folder / "f", folder / "f")
    remove_checkpoint(folder / ".lr_find_1.ckpt")
    assert read_last(folder) == folder / "f"


def test_removing_a_link_leaves_its_target(folder: Path) -> None:
    (folder / "link").symlink_to("a")
    remove_checkpoint(folder / "link")
    assert "a" in left(folder)


@pytest.mark.parametrize(("key", "value"), [("keep_last", 0), ("keep_best", -1)])
def test_wrong_numbers(key: str, value: int) -> None:
    with pytest.raises(ConfigError, match=f"{key} is {value}"):
        Retention(**{key: value})
