"""Saving while training goes on: the copy is of the moment, one save at a time, errors reach every rank, exit finishes."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hybrid_strategy.checkpoint import saving
from hybrid_strategy.checkpoint.asynchronous import AsyncSaver
from hybrid_strategy.checkpoint.content import CheckpointContent
from hybrid_strategy.checkpoint.loading import load_checkpoint
from hybrid_strategy.checkpoint.pieces import Piece
from hybrid_strategy.checkpoint.verify import find_latest
from hybrid_strategy.errors import CheckpointError, ConfigError
from hybrid_strategy.spec.shard import ShardSpec
from tests.support.ranks import run_ranks


def rank_and_size() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def content(value: float) -> CheckpointContent:
    """A tensor split by rows and one that all hold."""
    rank, size = rank_and_size()
    rows = Piece(ShardSpec("rows", (2 * size, 3), (2 * rank, 0), (2, 3)), torch.full((2, 3), value))
    same = Piece.whole("same", torch.full((5,), value), owner=rank == 0)
    return CheckpointContent({"model.rows": rows, "model.same": same}, state={"value": value}, meta={"global_step": int(value)})


def loaded_value(path: Path) -> float:
    found = content(0.0)
    loaded = load_checkpoint(path, found.tensors)
    values = torch.cat([piece.tensor.flatten() for piece in found.tensors.values()])
    assert (values == values[0]).all()
    assert loaded.small.state == {"value": values[0].item()}
    return values[0].item()


class Slow:
    """Writing takes `seconds` and fails on one rank if told to."""

    def __init__(self, seconds: float, failing_rank: int | None = None) -> None:
        self.seconds, self.failing_rank, self.original = seconds, failing_rank, saving.write_items

    def __enter__(self) -> None:
        saving.write_items = self.write  # type: ignore[assignment]

    def __exit__(self, *_: Any) -> None:
        saving.write_items = self.original

    def write(self, *arguments: Any) -> Any:
        time.sleep(self.seconds)
        if self.failing_rank == rank_and_size()[0]:
            raise OSError(28, "No space left on device")
        return self.original(*arguments)


def save_then_change(folder: str) -> list[float]:
    path = Path(folder)
    with AsyncSaver() as saver:
        for value in (1.0, 2.0):
            given = content(value)
            with Slow(0.2):
                assert saver.save(path / f"{value}", given)
                for piece in given.tensors.values():
                    piece.tensor.fill_(-1)
                given.state["value"] = -1
                assert saver.busy
                report = saver.wait()
            assert report is not None
            assert report.path == str(path / f"{value}")
            assert saver.wait() is None
        staged = saver.staged_bytes
    assert staged <= sum(piece.num_bytes for piece in given.tensors.values())
    assert saver.staged_bytes == 0
    return [loaded_value(path / "1.0"), loaded_value(path / "2.0")]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_saved_values_are_those_of_the_call(tmp_path: Path, size: int) -> None:
    assert run_ranks(save_then_change, size, str(tmp_path)) == [[1.0, 2.0]] * size


def test_one_process_without_a_group(tmp_path: Path) -> None:
    assert save_then_change(str(tmp_path)) == [1.0, 2.0]


def save_twice(folder: str, when_busy: str) -> tuple[bool, bool, bool]:
    path = Path(folder)
    rank, _ = rank_and_size()
    with Slow(0.5 if rank == 0 else 0.0), AsyncSaver(when_busy=when_busy) as saver:
        first = saver.save(path / "1", content(1.0))
        time.sleep(0.1)  # by now rank 1 has written its blocks, rank 0 has not
        second = saver.save(path / "2", content(2.0))
        saver.wait()
        third = saver.save(path / "3", content(3.0))
    return first, second, third


@pytest.mark.parametrize("when_busy", ["wait", "skip"])
def test_a_second_save_waits_or_is_skipped_on_all_ranks(tmp_path: Path, when_busy: str) -> None:
    answers = run_ranks(save_twice, 2, str(tmp_path), when_busy)
    assert answers == [(True, when_busy == "wait", True)] * 2
    written = {path.name for path in tmp_path.iterdir()} - {"last"}
    assert written == ({"1", "2", "3"} if when_busy == "wait" else {"1", "3"})


def test_when_busy_is_checked() -> None:
    with pytest.raises(ConfigError, match=r"when_busy is 'wiat'.*Did you mean 'wait'"):
        AsyncSaver(when_busy="wiat")


def fail_in_the_writer(folder: str, at: str) -> str:
    path, text = Path(folder), "no error"
    with AsyncSaver() as saver:
        saver.save(path / "1", content(1.0))
        saver.wait()
        with Slow(0.0, failing_rank=1):
            saver.save(path / "2", content(2.0))
            try:
                saver.wait() if at == "wait" else saver.save(path / "3", content(3.0))
            except CheckpointError as error:
                text = str(error)
        assert saver.wait() is None
        saver.save(path / "4", content(4.0))
    return text


@pytest.mark.parametrize("at", ["wait", "save"])
def test_an_error_of_the_writer_reaches_all_ranks_once(tmp_path: Path, at: str) -> None:
    first, second = run_ranks(fail_in_the_writer, 2, str(tmp_path), at, timeout=30)
    assert first == second
    assert "rank 1 could not write it. OSError: [Errno 28] No space left on device" in first
    assert {path.name for path in tmp_path.iterdir()} == {"1", "4", "last"}


SCRIPT = """
import sys, time, torch
from hybrid_strategy.checkpoint import saving
from hybrid_strategy.checkpoint.asynchronous import AsyncSaver
from hybrid_strategy.checkpoint.content import CheckpointContent
from hybrid_strategy.checkpoint.pieces import Piece
original = saving.write_items
def slow(*arguments):
    time.sleep(1)
    return original(*arguments)
saving.write_items = slow
tensors = {f"model.{name}": Piece.whole(name, torch.ones(2**20)) for name in "ab"}
AsyncSaver().save(sys.argv[1], CheckpointContent(tensors))
"""


def test_a_process_that_ends_finishes_its_last_save(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path / "a")], check=True, timeout=60)
    assert find_latest(tmp_path).path == tmp_path / "a"
