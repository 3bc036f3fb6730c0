"""A checkpoint of any layout loads into any other, bit by bit; the ranks agree on every failure."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hybrid_strategy.checkpoint import folder as folders
from hybrid_strategy.checkpoint import storage
from hybrid_strategy.checkpoint.content import CheckpointContent
from hybrid_strategy.checkpoint.loading import LoadOptions, load_checkpoint, saved_names
from hybrid_strategy.checkpoint.pieces import Piece, key_path, model_key, optimizer_key
from hybrid_strategy.checkpoint.saving import SaveOptions, save_checkpoint
from hybrid_strategy.errors import CheckpointError
from hybrid_strategy.spec.shard import ShardSpec, even_chunk
from tests.support.ranks import run_ranks

SHAPES = {
    "net.embed.weight": ((7, 5), torch.float32),
    "net.a.weight": ((5, 7), torch.bfloat16),
    "net.a.bias": ((5,), torch.float32),
    "net.b.weight": ((2, 3, 4), torch.float16),
    "net.b.count": ((), torch.int64),
    "net.c.mask": ((3,), torch.bool),
    "net.none": ((0, 4), torch.float32),
}
LAYOUTS = [
    ("replicated", 1),
    ("replicated", 3),
    ("rows", 2),
    ("rows", 3),
    ("rows", 4),
    ("columns", 2),
    ("columns", 3),
    ("stages", 2),
    ("stages", 4),
    ("grid", 4),
    ("zero1", 2),
    ("zero1", 3),
]


def full(key: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(key.encode()))
    return (torch.randn(shape, generator=generator) * 100).to(dtype)


def full_tensors() -> dict[str, torch.Tensor]:
    tensors = {model_key(name): full(name, shape, dtype) for name, (shape, dtype) in SHAPES.items()}
    moments = {optimizer_key(name, "exp_avg"): full(name + "m", shape, torch.float32) for name, (shape, _) in SHAPES.items()}
    return {**tensors, **moments}


def block(shape: tuple[int, ...], layout: str, rank: int, size: int, key: str) -> tuple[list[int], list[int], bool] | None:
    """Offsets, sizes and ownership of a rank's block; None if the rank does not hold the tensor at all."""
    offsets, sizes = [0] * len(shape), list(shape)
    if layout == "stages":
        names = sorted(SHAPES)
        name = next(name for name in names if name in key)
        return (offsets, sizes, True) if names.index(name) % size == rank else None
    if (layout == "zero1" and key.startswith("model.")) or layout == "replicated" or not shape:
        return offsets, sizes, rank == 0
    if layout == "grid":
        offsets[0], sizes[0] = even_chunk(shape[0], 2, rank // 2)
        if len(shape) > 1:
            offsets[1], sizes[1] = even_chunk(shape[1], 2, rank % 2)
        return offsets, sizes, len(shape) > 1 or rank % 2 == 0
    dim = len(shape) - 1 if layout == "columns" else 0
    offsets[dim], sizes[dim] = even_chunk(shape[dim], size, rank)
    return offsets, sizes, True


def make_pieces(layout: str, rank: int, size: int, fill: bool) -> dict[str, Piece]:
    pieces = {}
    for key, tensor in full_tensors().items():
        found = block(tuple(tensor.shape), layout, rank, size, key)
        if found is not None:
            spec = ShardSpec(key, tuple(tensor.shape), tuple(found[0]), tuple(found[1]), found[2])
            values = tensor[spec.slices].clone() if fill else torch.zeros(spec.sizes, dtype=tensor.dtype)
            pieces[key] = Piece(spec, values)
    return pieces


def save_layout(path: str, layout: str, **options: Any) -> Any:
    rank, size = dist.get_rank(), dist.get_world_size()
    pieces = make_pieces(layout, rank, size, fill=True)
    names = {key.split(".", 1)[1] for key in pieces if key.startswith("model.")}
    content = CheckpointContent(
        pieces,
        replicated={f"groups.{name}": {"lr": 0.1 + len(name), "betas": (0.9, 0.95)} for name in names},
        random_state={f"dp{rank}": {"torch": torch.get_rng_state()}},
        state={"loops": {"step": 3}, "rank": rank},
        plan={"layout": layout},
        meta={"global_step": 3, "position": {"epoch": 1, "samples": 12}},
    )
    return save_checkpoint(path, content, SaveOptions(**options))


def load_layout(path: str, layout: str) -> Any:
    rank, size = dist.get_rank(), dist.get_world_size()
    pieces = make_pieces(layout, rank, size, fill=False)
    loaded = load_checkpoint(path, pieces)
    expected = full_tensors()
    for key, piece in pieces.items():
        assert torch.equal(piece.tensor, expected[key][piece.spec.slices]), (key, piece.spec)
    assert loaded.certificate.complete, loaded.certificate.lines()
    return loaded


@pytest.mark.parametrize(("layout", "size"), LAYOUTS)
def test_every_layout_to_every_layout(tmp_path: Path, layout: str, size: int) -> None:
    path = tmp_path / "step=3.ckpt"
    run_ranks(save_layout, size, str(path), layout)
    for other, other_size in LAYOUTS:
        loaded = run_ranks(load_layout, other_size, str(path), other)
        for each in loaded:
            assert each.small.state == {"loops": {"step": 3}, "rank": 0}
            assert each.small.plan == {"layout": layout}
            assert each.small.meta["position"] == {"epoch": 1, "samples": 12}
            assert set(each.small.random_state) == {f"dp{rank}" for rank in range(size)}
            assert each.small.replicated == {
                f"groups.{name}": {"lr": 0.1 + len(name), "betas": (0.9, 0.95)} for name in sorted(SHAPES)
            }


def test_one_process_without_a_group(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    pieces = make_pieces("replicated", 0, 1, fill=True)
    report = save_checkpoint(path, CheckpointContent(pieces))
    assert report.num_bytes == sum(f.stat().st_size for f in path.iterdir() if f.name != "manifest.json")
    empty = make_pieces("replicated", 0, 1, fill=False)
    assert load_checkpoint(path, empty).certificate.complete
    assert all(torch.equal(empty[key].tensor, pieces[key].tensor) for key in pieces)
    assert folders.read_last(tmp_path) == path
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.ckpt", "last"]


def test_saved_names(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "a", CheckpointContent(make_pieces("replicated", 0, 1, fill=True)))
    names = saved_names(tmp_path / "a")
    assert names.keys() == full_tensors().keys()
    assert names["model.net.a.weight"].shape == (5, 7)
    assert names["model.net.a.weight"].dtype == torch.bfloat16
    assert names["model.net.none"].shape == (0, 4)


def test_precision_may_change(tmp_path: Path) -> None:
    values = torch.randn(4, 4)
    save_checkpoint(tmp_path / "a", CheckpointContent({"model.w": Piece.whole("w", values)}))
    half = Piece.whole("w", torch.nn.Parameter(torch.zeros(4, 4, dtype=torch.bfloat16)))
    load_checkpoint(tmp_path / "a", {"model.w": half})
    assert torch.equal(half.tensor, values.bfloat16())


def test_a_view_is_written_without_the_rest_of_its_storage(tmp_path: Path) -> None:
    big = torch.randn(1000, 1000)
    report = save_checkpoint(tmp_path / "a", CheckpointContent({"model.w": Piece.whole("w", big[3:5].t())}))
    assert report.num_bytes < 50_000
    back = Piece.whole("w", torch.zeros(1000, 2))
    load_checkpoint(tmp_path / "a", {"model.w": back})
    assert torch.equal(back.tensor, big[3:5].t())


def spread(path: str, owners_only: bool) -> None:
    rank = dist.get_rank()
    pieces = {f"model.w{i}": Piece.whole(f"w{i}", torch.full((100, 100), float(i)), owner=rank == 0) for i in range(16)}
    save_checkpoint(path, CheckpointContent(pieces), SaveOptions(owners_only=owners_only))


@pytest.mark.parametrize("owners_only", [False, True])
def test_replicas_write_one_copy_and_share_the_work(tmp_path: Path, owners_only: bool) -> None:
    run_ranks(spread, 4, str(tmp_path / "a"), owners_only)
    sizes = [file.stat().st_size for file in (tmp_path / "a").glob("*.distcp")]
    assert 640_000 < sum(sizes) < 700_000
    assert len(sizes) == (1 if owners_only else 4)
    assert max(sizes) / (sum(sizes) / len(sizes)) < 1.5


def test_overwriting_replaces_the_folder(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    path.write_text("a single-file checkpoint was here")
    for value in (1.0, 2.0):
        save_checkpoint(path, CheckpointContent({"model.w": Piece.whole("w", torch.tensor([value]))}))
        piece = Piece.whole("w", torch.zeros(1))
        load_checkpoint(path, {"model.w": piece})
        assert piece.tensor.item() == value
    assert sorted(p.name for p in tmp_path.iterdir()) == ["last", "last.ckpt"]


def test_overwriting_a_link_leaves_its_target(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "a.ckpt", CheckpointContent({"model.w": Piece.whole("w", torch.tensor([1.0]))}))
    (tmp_path / "last.ckpt").symlink_to("a.ckpt")
    piece = Piece.whole("w", torch.zeros(1))
    load_checkpoint(tmp_path / "last.ckpt", {"model.w": piece})
    assert piece.tensor.item() == 1
    save_checkpoint(tmp_path / "last.ckpt", CheckpointContent({"model.w": Piece.whole("w", torch.tensor([2.0]))}))
    assert not (tmp_path / "last.ckpt").is_symlink()
    load_checkpoint(tmp_path / "a.ckpt", {"model.w": piece})
    assert piece.tensor.item() == 1


def test_a_checkpoint_called_last(tmp_path: Path) -> None:
    for name in ("last", "other", "last"):
        save_checkpoint(tmp_path / name, CheckpointContent({"model.w": Piece.whole("w", torch.ones(1))}))
    assert sorted(each.name for each in tmp_path.iterdir()) == ["last", "other"]
    assert folders.read_last(tmp_path) is None


def test_a_folder_of_other_things_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="holds other things"):
        save_checkpoint(tmp_path / "runs", CheckpointContent({"model.w": Piece.whole("w", torch.ones(1))}))
    assert (tmp_path / "runs" / "mine").is_dir()


def test_a_folder_with_a_manifest_of_another_program_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "page").mkdir()
    (tmp_path / "page" / "manifest.json").write_text("{}")
    with pytest.raises(CheckpointError, match="holds other things"):
        save_checkpoint(tmp_path / "page", CheckpointContent({}))


def test_names_that_do_not_match(tmp_path: Path) -> None:
    def ones(name: str) -> Piece:
        return Piece.whole(name, torch.ones(2))

    save_checkpoint(tmp_path / "a", CheckpointContent({k: ones(k) for k in ("model.a", "model.b", "optimizer.a.m", "ema.a")}))
    asked = {key: Piece.whole(key, torch.zeros(2)) for key in ("model.a", "model.c", "optimizer.a.v")}
    with pytest.raises(CheckpointError, match=r"Missing in it: model\.c\. Without a place in the model: model\.b"):
        load_checkpoint(tmp_path / "a", asked)
    assert asked["model.a"].tensor.sum() == 0
    certificate = load_checkpoint(tmp_path / "a", asked, LoadOptions(strict=False)).certificate
    assert certificate.missing == ("model.c", "optimizer.a.v")
    assert certificate.unexpected == ("model.b", "optimizer.a.m")
    assert certificate.not_restored == (("ema", "its 1 tensors were not asked for"),)
    text = "\n".join(certificate.lines())
    for name in ("model.c", "optimizer.a.v", "model.b", "optimizer.a.m", "ema"):
        assert name in text


def test_a_shape_that_differs_is_named(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "a", CheckpointContent({"model.w": Piece.whole("w", torch.ones(5, 7))}))
    with pytest.raises(CheckpointError, match=r"model\.w is \(5, 7\).*\(5, 8\)"):
        load_checkpoint(tmp_path / "a", {"model.w": Piece.whole("w", torch.ones(5, 8))})


def test_blocks_that_leave_a_gap_are_refused(tmp_path: Path) -> None:
    half = Piece(ShardSpec("w", (4,), (0,), (2,)), torch.ones(2))
    with pytest.raises(CheckpointError, match=r"model\.w.*whole"):
        save_checkpoint(tmp_path / "a", CheckpointContent({"model.w": half}))
    not_owned = Piece.whole("w", torch.ones(2), owner=False)
    with pytest.raises(CheckpointError, match=r"model\.w.*no rank holds"):
        save_checkpoint(tmp_path / "a", CheckpointContent({"model.w": not_owned}), SaveOptions(owners_only=True))
    assert list(tmp_path.iterdir()) == []


def caught(function: Any, *arguments: Any) -> str:
    try:
        function(*arguments)
    except CheckpointError as error:
        return str(error)
    return "no error"


def save_disagreeing(path: str, what: str) -> str:
    rank = dist.get_rank()
    tensor = torch.ones(2, dtype=torch.float32 if what != "dtype" or rank == 0 else torch.float64)
    content = CheckpointContent({"model.w": Piece.whole("w", tensor)})
    if what == "replicated":
        content.replicated = {"groups.w": {"lr": float(rank)}}
    return caught(save_checkpoint, path, content)


@pytest.mark.parametrize(("what", "text"), [("replicated", "groups.w.*different values"), ("dtype", "declare it differently")])
def test_ranks_that_disagree_are_refused_everywhere(tmp_path: Path, what: str, text: str) -> None:
    first, second = run_ranks(save_disagreeing, 2, str(tmp_path / "a"), what)
    assert first == second
    with pytest.raises(CheckpointError, match=text):
        raise CheckpointError(first)
    assert list(tmp_path.iterdir()) == []


class FailingStream:
    """A disk that refuses after the first bytes."""

    def __init__(self, stream: Any, error: OSError) -> None:
        self.stream, self.error, self.count = stream, error, 0

    def write(self, data: Any) -> int:
        self.count += len(data)
        if self.count > 1000:
            raise self.error
        return int(self.stream.write(data))

    def flush(self) -> None:
        self.stream.flush()


def save_failing(path: str, failing_rank: int, kind: str) -> str:
    original = storage.DigestFile.__init__
    error = OSError(28, "No space left on device") if kind == "full" else PermissionError(13, "Permission denied")

    def failing(self: Any, stream: Any) -> None:
        original(self, FailingStream(stream, error) if dist.get_rank() == failing_rank else stream)  # type: ignore[arg-type]

    storage.DigestFile.__init__ = failing  # type: ignore[method-assign]
    try:
        return caught(save_layout, path, "rows")
    finally:
        storage.DigestFile.__init__ = original  # type: ignore[method-assign]


@pytest.mark.parametrize("kind", ["full", "permission"])
@pytest.mark.parametrize("failing_rank", [0, 1])
def test_a_failed_write_on_one_rank_reaches_all_and_leaves_the_old_one(tmp_path: Path, failing_rank: int, kind: str) -> None:
    path = tmp_path / "a.ckpt"
    run_ranks(save_layout, 2, str(path), "rows")
    errors = run_ranks(save_failing, 2, str(path), failing_rank, kind, timeout=20)
    assert errors[0] == errors[1]
    assert f"rank {failing_rank} could not write it" in errors[0]
    assert ("No space left" if kind == "full" else "PermissionError") in errors[0]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.ckpt", "last"]
    run_ranks(load_layout, 2, str(path), "rows")


def save_on_rank_0_only(path: str) -> str:
    return caught(lambda: save_layout(path, "rows", arrival_seconds=1.0)) if dist.get_rank() == 0 else "elsewhere"


def test_saving_on_one_rank_only_is_refused(tmp_path: Path) -> None:
    text, _ = run_ranks(save_on_rank_0_only, 2, str(tmp_path / "a"), timeout=20)
    assert "not all ranks came to save it" in text
    assert "rank-zero block" in text


def test_a_disk_that_is_too_small_is_refused_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(folders.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(CheckpointError, match=r"does not fit.*1000 B are free"):
        save_checkpoint(tmp_path / "a", CheckpointContent({"model.w": Piece.whole("w", torch.ones(1000))}))
    assert os.listdir(tmp_path) == []


def test_key_path() -> None:
    assert key_path("alone") == ("alone",)


def test_a_file_called_last_that_is_no_pointer_stays(tmp_path: Path) -> None:
    (tmp_path / "last").write_text("notes\nof weeks\n")
    save_checkpoint(tmp_path / "1", CheckpointContent({}))
    assert (tmp_path / "last").read_text() == "notes\nof weeks\n"
