"""The file of a rank's blocks."""

from __future__ import annotations

import pickle
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from hybrid_strategy.checkpoint.content import CheckpointContent
from hybrid_strategy.checkpoint.loading import load_checkpoint, read_whole
from hybrid_strategy.checkpoint.manifest import read_manifest
from hybrid_strategy.checkpoint.pieces import Piece
from hybrid_strategy.checkpoint.saving import save_checkpoint
from hybrid_strategy.errors import CheckpointError

SHAPES = {f"w{number}": (number + 1, 7) for number in range(9)} | {"step": (), "none": (0, 4)}


def _saved(path: Path) -> dict[str, torch.Tensor]:
    tensors = {f"model.{name}": torch.randn(shape) for name, shape in SHAPES.items()}
    save_checkpoint(path, CheckpointContent({name: Piece.whole(name[6:], each) for name, each in tensors.items()}))
    return tensors


def test_blocks_that_are_no_data_are_named(tmp_path: Path) -> None:
    """Also where files are not compared with their digests."""
    _saved(tmp_path / "a")
    file = tmp_path / "a" / "__0_0.distcp"
    file.write_bytes(pickle.dumps(Path).ljust(file.stat().st_size, b"\0"))
    with pytest.raises(CheckpointError, match="its blocks cannot be read"):
        read_whole(tmp_path / "a", "model.w3")


def test_all_blocks_come_back(tmp_path: Path) -> None:
    tensors = _saved(tmp_path / "a")
    assert [each.name for each in (tmp_path / "a").glob("*.distcp")] == ["__0_0.distcp"]
    assert "__0_0.distcp" in read_manifest(tmp_path / "a").files
    empty = {name: torch.full_like(each, torch.nan) for name, each in tensors.items()}
    assert load_checkpoint(tmp_path / "a", {n: Piece.whole(n[6:], each) for n, each in empty.items()}).certificate.complete
    assert all(torch.equal(empty[name], tensors[name]) for name in tensors)
    by_torch = {name: torch.full_like(each, torch.nan) for name, each in tensors.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is one process
        dcp.load(by_torch, checkpoint_id=tmp_path / "a", no_dist=True)
    assert all(torch.equal(by_torch[name], tensors[name]) for name in tensors)
