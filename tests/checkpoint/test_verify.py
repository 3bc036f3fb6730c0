"""Damaged, unfinished and half-replaced checkpoints are named and passed over; a killed save leaves the earlier one."""

from __future__ import annotations

import json
import os
import pickle
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hybrid_strategy.checkpoint import folder as folders
from hybrid_strategy.checkpoint.content import CheckpointContent
from hybrid_strategy.checkpoint.digests import read_digest
from hybrid_strategy.checkpoint.folder import read_last, remove_unfinished, resolve
from hybrid_strategy.checkpoint.loading import load_checkpoint
from hybrid_strategy.checkpoint.manifest import write_manifest
from hybrid_strategy.checkpoint.pieces import Piece
from hybrid_strategy.checkpoint.saving import save_checkpoint
from hybrid_strategy.checkpoint.verify import find_latest, read_meta, verify_checkpoint
from hybrid_strategy.errors import CheckpointError
from tests.support.ranks import run_ranks

SMALL = ["meta.pt", "replicated.pt", "rng.pt", "plan.json", "meta.json", ".metadata"]
BLOCKS = "__0_0.distcp"


def save(path: Path, value: float) -> Path:
    tensors = {"model.w": Piece.whole("w", torch.full((50, 50), value))}
    save_checkpoint(path, CheckpointContent(tensors, state={"value": value}, meta={"global_step": int(value)}))
    return path


def load(path: Path) -> float:
    piece = Piece.whole("w", torch.zeros(50, 50))
    load_checkpoint(path, {"model.w": piece})
    return piece.tensor[3, 4].item()


def damage(path: Path, kind: str) -> str:
    """Damages one file; returns what the error must say of it."""
    data = path.read_bytes()
    if kind == "truncated":
        path.write_bytes(data[: len(data) // 2])
    elif kind == "altered":
        where = random.Random(len(data)).randrange(len(data))
        path.write_bytes(data[:where] + bytes([data[where] ^ 4]) + data[where + 1 :])
    else:
        path.unlink()
    return f"its file {path.name} is {kind}"


@pytest.mark.parametrize("kind", ["truncated", "altered", "missing"])
@pytest.mark.parametrize("name", [*SMALL, BLOCKS])
def test_every_damage_is_named_and_the_one_before_is_chosen(tmp_path: Path, name: str, kind: str) -> None:
    good, bad = save(tmp_path / "1", 1.0), save(tmp_path / "2", 2.0)
    expected = damage(bad / name, kind)
    for check in (verify_checkpoint, load):
        with pytest.raises(CheckpointError) as caught:
            check(bad)
        assert expected in str(caught.value)
    found = find_latest(tmp_path)
    assert found.path == good
    assert [name for name, _ in found.skipped] == ["2"]
    assert expected in "\n".join(found.lines())
    assert load(good) == 1.0


@pytest.mark.parametrize("kind", ["truncated", "altered", "missing"])
def test_a_damaged_manifest(tmp_path: Path, kind: str) -> None:
    good, bad = save(tmp_path / "1", 1.0), save(tmp_path / "2", 2.0)
    damage(bad / "manifest.json", kind)
    with pytest.raises(CheckpointError, match=r"its file manifest\.json is (altered|missing)"):
        load(bad)
    found = find_latest(tmp_path)
    assert found.path == good
    assert "manifest.json" in "\n".join(found.lines())


def test_a_manifest_whose_numbers_were_changed(tmp_path: Path) -> None:
    path = save(tmp_path / "1", 1.0) / "manifest.json"
    body = json.loads(path.read_text())
    body["created_seconds"] += 1
    path.write_text(json.dumps(body))
    with pytest.raises(CheckpointError, match="Its own digest does not match"):
        verify_checkpoint(tmp_path / "1")


def test_digests_of_earlier_checkpoints_are_verified(tmp_path: Path) -> None:
    folder = save(tmp_path / "1", 1.0)
    names = json.loads((folder / "manifest.json").read_text())["files"]
    files = {name: read_digest(folder / name, "sha256") for name in names}
    write_manifest(folder, files)
    assert all("sha256" in each for each in json.loads((folder / "manifest.json").read_text())["files"].values())
    assert load(folder) == 1.0
    said = damage(folder / BLOCKS, "altered")
    with pytest.raises(CheckpointError, match=said):
        load(folder)


def test_a_newer_format_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hybrid_strategy.checkpoint.manifest.FORMAT_VERSION", 3)
    path = save(tmp_path / "1", 1.0)
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="is of format 3"):
        load(path)


def test_an_index_that_would_run_code_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "1", 1.0)

    class Evil:
        def __reduce__(self) -> Any:
            return os.system, (f"touch {tmp_path}/ran",)

    (path / ".metadata").write_bytes(pickle.dumps(Evil()))
    (path / "manifest.json").unlink()
    from hybrid_strategy.checkpoint.loading import saved_names

    with pytest.raises(CheckpointError, match="not allowed in an index"):
        saved_names(path)
    assert not (tmp_path / "ran").exists()


def load_on_ranks(path: str) -> str:
    rank = dist.get_rank()
    try:
        load_checkpoint(path, {"model.w": Piece.whole("w", torch.zeros(50, 50), owner=rank == 0)})
    except CheckpointError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("name", [BLOCKS, "meta.pt", "manifest.json"])
def test_all_ranks_raise_for_damage_only_one_of_them_reads(tmp_path: Path, name: str) -> None:
    damage(save(tmp_path / "1", 1.0) / name, "altered")
    errors = run_ranks(load_on_ranks, 3, str(tmp_path / "1"), timeout=20)
    assert len(set(errors)) == 1
    assert f"its file {name} is altered" in errors[0]


def find_on_ranks(folder: str) -> str:
    return str(find_latest(folder).path)


def test_all_ranks_find_the_same(tmp_path: Path) -> None:
    save(tmp_path / "1", 1.0)
    assert run_ranks(find_on_ranks, 2, str(tmp_path)) == [str(tmp_path / "1")] * 2


def test_nothing_to_find(tmp_path: Path) -> None:
    assert find_latest(tmp_path).path is None
    assert find_latest(tmp_path / "nowhere").lines() == ["No good checkpoint was found"]
    with pytest.raises(CheckpointError, match="there is no such folder"):
        load(tmp_path / "nowhere")


def test_unfinished_folders_are_passed_over_and_removed(tmp_path: Path) -> None:
    save(tmp_path / "1", 1.0)
    partial = tmp_path / "2.partial-0a1b2c3d"
    save(tmp_path / "x", 2.0).rename(partial)
    found = find_latest(tmp_path)
    assert found.path == tmp_path / "1"
    assert found.skipped == (("2.partial-0a1b2c3d", "it was never finished"),)
    assert remove_unfinished(tmp_path) == ["2.partial-0a1b2c3d"]
    assert not partial.exists()


def test_a_process_that_ends_between_the_two_renames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(tmp_path / "last.ckpt", 1.0)
    original = Path.rename

    def rename(self: Path, target: Path) -> Path:
        if ".partial-" in self.name:
            raise KeyboardInterrupt  # stands for the end of the process: nothing after it runs
        return original(self, target)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(KeyboardInterrupt):
        save(path, 2.0)
    monkeypatch.undo()
    assert not path.exists()
    assert ".old-" in resolve(path).name
    assert load(path) == 1.0
    assert find_latest(tmp_path).path == resolve(path)
    last = read_last(tmp_path)
    assert last is not None
    assert load(last) == 1.0
    save(path, 3.0)
    assert load(path) == 3.0
    assert sorted(each.name for each in tmp_path.iterdir()) == ["last", "last.ckpt"]


def test_a_rename_that_fails_puts_the_old_one_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(tmp_path / "a", 1.0)
    original = Path.rename

    def rename(self: Path, target: Path) -> Path:
        if ".partial-" in self.name:
            raise PermissionError(13, "Permission denied")
        return original(self, target)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(CheckpointError, match="PermissionError"):
        save(path, 2.0)
    monkeypatch.undo()
    assert load(path) == 1.0
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a", "last"]


def test_meta_is_read_alone(tmp_path: Path) -> None:
    assert read_meta(save(tmp_path / "a", 5.0)) == {"global_step": 5}


SCRIPT = """
import sys, time, torch
from pathlib import Path
from hybrid_strategy.checkpoint.content import CheckpointContent
from hybrid_strategy.checkpoint.pieces import Piece
from hybrid_strategy.checkpoint.saving import save_checkpoint
folder, same_name = Path(sys.argv[1]), sys.argv[2] == "same"
for step in range(1, 10_000):
    tensors = {f"model.w{i}": Piece.whole(f"w{i}", torch.full((100, 1000), float(step))) for i in range(8)}
    path = folder / ("one.ckpt" if same_name else f"{step}.ckpt")
    save_checkpoint(path, CheckpointContent(tensors, meta={"global_step": step}))
    print(step, flush=True)
"""


@pytest.mark.parametrize("names", ["same", "new"])
@pytest.mark.parametrize("seed", range(3))
def test_sigkill_at_any_moment_leaves_the_last_complete_one(tmp_path: Path, names: str, seed: int) -> None:
    command = [sys.executable, "-c", SCRIPT, str(tmp_path), names]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for _ in range(3):
            process.stdout.readline()
        time.sleep(random.Random(seed).random() * 0.3)
        process.send_signal(signal.SIGKILL)
        reported = [int(line) for line in process.stdout.read().split()]
    committed_step = max(reported, default=3)
    found = find_latest(tmp_path)
    assert found.path is not None
    step = read_meta(found.path)["global_step"]
    assert step in (committed_step, committed_step + 1)  # the kill may come between the commit and its report
    tensors = {f"model.w{i}": Piece.whole(f"w{i}", torch.zeros(100, 1000)) for i in range(8)}
    load_checkpoint(found.path, tensors)
    assert all((piece.tensor == step).all() for piece in tensors.values())


ONE_DIES = """
import os, signal, sys, torch
import torch.distributed as dist
from hybrid_strategy.checkpoint import saving
from hybrid_strategy.checkpoint.content import CheckpointContent
from hybrid_strategy.checkpoint.pieces import Piece
from hybrid_strategy.errors import CheckpointError
from hybrid_strategy.spec.shard import ShardSpec
folder, rank = sys.argv[1], int(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
def save(name):
    piece = Piece(ShardSpec("w", (4,), (2 * rank,), (2,)), torch.ones(2))
    saving.save_checkpoint(f"{folder}/run/{name}", CheckpointContent({"model.w": piece}))
save("1")
if rank == 1:
    saving.write_items = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
try:
    save("2")
except CheckpointError as error:
    print(error, flush=True)
os._exit(0)
"""


def test_a_rank_that_is_killed_while_writing_ends_the_save_on_the_others(tmp_path: Path) -> None:
    commands = [[sys.executable, "-W", "ignore", "-c", ONE_DIES, str(tmp_path), str(rank)] for rank in range(2)]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    processes = [subprocess.Popen(each, stdout=subprocess.PIPE, text=True, env=environment) for each in commands]
    outputs = [each.communicate(timeout=60)[0] for each in processes]
    assert "the group of ranks could not write it" in outputs[0]
    assert find_latest(tmp_path / "run").path == tmp_path / "run" / "1"
    assert sorted(each.name for each in (tmp_path / "run").iterdir()) == ["1", "last"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 4 MiB, where mounting is allowed."""
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(small)], capture_output=True).returncode:
        pytest.skip("a full or read-only disk needs a file system of its own, and mounting a tmpfs needs root")
    yield small
    subprocess.run(["umount", str(small)], check=True)


def test_a_full_disk(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(small_disk / "1", 1.0)
    big = CheckpointContent({"model.w": Piece.whole("w", torch.ones(1200, 1200))})
    with pytest.raises(CheckpointError, match="does not fit"):
        save_checkpoint(small_disk / "2", big)
    monkeypatch.setattr(folders, "check_space", lambda *_: None)  # to get to the failure itself
    with pytest.raises(CheckpointError, match=r"rank 0 could not write it.*No space left on device"):
        save_checkpoint(small_disk / "2", big)
    assert sorted(each.name for each in small_disk.iterdir()) == ["1", "last"]
    assert load(small_disk / "1") == 1.0


def test_a_read_only_folder(small_disk: Path) -> None:
    save(small_disk / "1", 1.0)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    for name in ("1", "2"):
        with pytest.raises(CheckpointError, match=r"rank 0 could not prepare it.*Read-only file system"):
            save(small_disk / name, 2.0)
    assert find_latest(small_disk).path == small_disk / "1"
    assert load(small_disk / "1") == 1.0
