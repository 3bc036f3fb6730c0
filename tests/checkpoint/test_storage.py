"""The files of a rank's blocks: one for a small state, two side by side for a large one."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from hybrid_strategy.checkpoint import storage
from hybrid_strategy.checkpoint.content import CheckpointContent
from hybrid_strategy.checkpoint.loading import load_checkpoint
from hybrid_strategy.checkpoint.manifest import read_manifest
from hybrid_strategy.checkpoint.pieces import Piece
from hybrid_strategy.checkpoint.saving import save_checkpoint
from hybrid_strategy.checkpoint.verify import verify_checkpoint
from hybrid_strategy.errors import CheckpointError

SHAPES = {f"w{number}": (number + 1, 7) for number in range(9)} | {"step": (), "none": (0, 4)}


def _saved(path: Path) -> dict[str, torch.Tensor]:
    tensors = {f"model.{name}": torch.randn(shape) for name, shape in SHAPES.items()}
    save_checkpoint(path, CheckpointContent({name: Piece.whole(name[6:], each) for name, each in tensors.items()}))
    return tensors


@pytest.mark.parametrize(("one_file_bytes", "files"), [(2**20, ["__0_0.distcp"]), (0, ["__0_0.distcp", "__0_1.distcp"])])
def test_all_blocks_come_back(one_file_bytes: int, files: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "_ONE_FILE_BYTES", one_file_bytes)
    tensors = _saved(tmp_path / "a")
    assert sorted(each.name for each in (tmp_path / "a").glob("*.distcp")) == files
    assert set(files) < set(read_manifest(tmp_path / "a").files)
    empty = {name: torch.full_like(each, torch.nan) for name, each in tensors.items()}
    assert load_checkpoint(tmp_path / "a", {n: Piece.whole(n[6:], each) for n, each in empty.items()}).certificate.complete
    assert all(torch.equal(empty[name], tensors[name]) for name in tensors)
    by_torch = {name: torch.full_like(each, torch.nan) for name, each in tensors.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is one process
        dcp.load(by_torch, checkpoint_id=tmp_path / "a", no_dist=True)
    assert all(torch.equal(by_torch[name], tensors[name]) for name in tensors)


def test_the_two_files_are_of_one_size_and_both_are_looked_after(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "_ONE_FILE_BYTES", 0)
    _saved(tmp_path / "a")
    first, second = sorted((tmp_path / "a").glob("*.distcp"))
    assert abs(first.stat().st_size - second.stat().st_size) < 4096
    second.write_bytes(second.read_bytes()[:-1] + b"?")
    with pytest.raises(CheckpointError, match=f"its file {second.name} is altered"):
        verify_checkpoint(tmp_path / "a")


def test_one_block_is_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "_ONE_FILE_BYTES", 0)
    save_checkpoint(tmp_path / "a", CheckpointContent({"model.w": Piece.whole("w", torch.ones(3))}))
    assert [each.name for each in (tmp_path / "a").glob("*.distcp")] == ["__0_0.distcp"]
