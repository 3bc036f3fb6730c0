"""Out to safetensors and back in, each rank reading its blocks; Lightning's own tool reads the folder."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from hybrid_strategy.checkpoint import export
from hybrid_strategy.checkpoint.content import CheckpointContent
from hybrid_strategy.checkpoint.export import ExportOptions, export_file, export_folder
from hybrid_strategy.checkpoint.importing import ImportOptions, import_safetensors, import_single_file
from hybrid_strategy.checkpoint.naming import Naming
from hybrid_strategy.checkpoint.pieces import Piece
from hybrid_strategy.checkpoint.saving import save_checkpoint
from hybrid_strategy.errors import CheckpointError
from hybrid_strategy.spec.shard import ShardSpec, even_chunk
from tests.support.ranks import run_ranks

_generator = torch.Generator().manual_seed(1)
WEIGHTS = {
    "model.embed.weight": torch.randn(7, 5, generator=_generator),
    "model.layer.weight": torch.randn(5, 7, generator=_generator).bfloat16(),
    "model.layer.bias": torch.randn(5, generator=_generator),
    "model.head.weight": torch.randn(3, 5, generator=_generator),
    "model.steps": torch.tensor(3),
    "model.mask": torch.tensor([True, False]),
    "optimizer.layer.bias.exp_avg": torch.randn(5, generator=_generator),
}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    pieces = {key: Piece.whole(key, tensor) for key, tensor in WEIGHTS.items()}
    save_checkpoint(tmp_path / "a.ckpt", CheckpointContent(pieces, state={"epoch": 2, "global_step": 9}))
    return tmp_path / "a.ckpt"


def rename(key: str) -> str | None:
    """The head is tied to nothing, the embedding has another name there, the rest is called as here."""
    head, _, name = key.partition(".")
    return {"embed.weight": "wte.weight"}.get(name, name) if head == "model" else None


def transposed(key: str) -> bool:
    return key == "model.layer.weight"


def expected(naming: bool) -> dict[str, torch.Tensor]:
    found = {key.partition(".")[2]: tensor for key, tensor in WEIGHTS.items() if key.startswith("model.")}
    if naming:
        found["wte.weight"] = found.pop("embed.weight")
        found["layer.weight"] = found["layer.weight"].t()
    return found


def assert_equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def test_one_file(checkpoint: Path, tmp_path: Path) -> None:
    report = export_file(checkpoint, tmp_path / "out" / "model.safetensors")
    assert_equal(load_file(report.path), expected(naming=False))
    assert report.left_out == ("optimizer.layer.bias.exp_avg",)
    assert report.num_bytes == Path(report.path).stat().st_size
    with safe_open(report.path, framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert [each.name for each in (tmp_path / "out").iterdir()] == ["model.safetensors"]


@pytest.mark.parametrize("shard_bytes", [10**9, 200, 1])
def test_a_folder(checkpoint: Path, tmp_path: Path, shard_bytes: int) -> None:
    options = ExportOptions(Naming(rename, transposed), shard_bytes=shard_bytes)
    report = export_folder(checkpoint, tmp_path / "hf", {"model_type": "tiny"}, options)
    assert json.loads((tmp_path / "hf" / "config.json").read_text()) == {"model_type": "tiny"}
    found = {name: tensor for file in report.files for name, tensor in load_file(tmp_path / "hf" / file).items()}
    assert_equal(found, expected(naming=True))
    index = tmp_path / "hf" / "model.safetensors.index.json"
    if shard_bytes == 10**9:
        assert list(report.files) == ["model.safetensors"]
        assert not index.exists()
    else:
        count = len(report.files)
        assert next(iter(report.files)) == f"model-00001-of-{count:05d}.safetensors"
        weight_map = json.loads(index.read_text())["weight_map"]
        assert weight_map == {name: file for file, names in report.files.items() for name in names}
    export_folder(checkpoint, tmp_path / "hf", {"model_type": "again"}, options)
    assert json.loads((tmp_path / "hf" / "config.json").read_text()) == {"model_type": "again"}


def test_another_precision(checkpoint: Path, tmp_path: Path) -> None:
    export_file(checkpoint, tmp_path / "b.safetensors", ExportOptions(dtype=torch.bfloat16))
    found = load_file(tmp_path / "b.safetensors")
    assert torch.equal(found["embed.weight"], WEIGHTS["model.embed.weight"].bfloat16())
    assert found["steps"].dtype == torch.int64
    assert found["mask"].dtype == torch.bool


def test_one_tensor_at_a_time(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import weakref

    alive: list[weakref.ref[torch.Tensor]] = []
    original = export._Source.read

    def read(self: export._Source, entry: export._Entry) -> torch.Tensor:
        assert sum(each() is not None for each in alive) <= 1
        tensor = original(self, entry)
        alive.append(weakref.ref(tensor))
        return tensor

    monkeypatch.setattr(export._Source, "read", read)
    export_file(checkpoint, tmp_path / "b.safetensors")
    assert len(alive) == 6


def test_two_tensors_of_one_name(checkpoint: Path, tmp_path: Path) -> None:
    naming = Naming(lambda key: "same" if key.startswith("model.") else None)
    with pytest.raises(CheckpointError, match=r"'same'.*model\.embed\.weight and model\.head\.weight"):
        export_file(checkpoint, tmp_path / "b.safetensors", ExportOptions(naming))
    assert not (tmp_path / "b.safetensors").exists()


def test_a_folder_of_other_things_is_not_replaced(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds other things"):
        export_folder(checkpoint, tmp_path, {})
    assert checkpoint.is_dir()


def test_an_earlier_export_is_replaced_unless_a_tokenizer_lies_in_it(checkpoint: Path, tmp_path: Path) -> None:
    target = tmp_path / "hf"
    for shard_bytes in (64, 10**9):
        export_folder(checkpoint, target, {}, ExportOptions(shard_bytes=shard_bytes))
    (target / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"would be replaced. There are tokenizer.json. Set the path of a new folder"):
        export_folder(checkpoint, target, {})
    assert (target / "tokenizer.json").is_file()


def blocks(rank: int, size: int, dim: int) -> dict[str, Piece]:
    pieces = {}
    for key, tensor in WEIGHTS.items():
        offsets, sizes = [0] * tensor.dim(), list(tensor.shape)
        if tensor.dim() > 0:
            along = min(dim, tensor.dim() - 1)
            offsets[along], sizes[along] = even_chunk(tensor.shape[along], size, rank)
        spec = ShardSpec(key, tuple(tensor.shape), tuple(offsets), tuple(sizes))
        pieces[key] = Piece(spec, torch.zeros(sizes, dtype=tensor.dtype))
    return pieces


def import_blocks(path: str, dim: int, kind: str) -> int:
    pieces = blocks(dist.get_rank(), dist.get_world_size(), dim)
    options = ImportOptions(Naming(rename, transposed) if kind == "folder" else Naming())
    if kind == "single":
        rest, certificate = import_single_file(path, pieces, options)
        assert rest == {"epoch": 2}
    else:
        certificate = import_safetensors(path, pieces, options)
    for key, piece in pieces.items():
        wanted = WEIGHTS[key][piece.spec.slices] if key.startswith("model.") else torch.zeros(piece.spec.sizes)
        assert torch.equal(piece.tensor, wanted), key
    assert certificate.complete
    return len(certificate.lines())


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("kind", ["file", "folder", "single"])
def test_each_rank_imports_its_blocks(checkpoint: Path, tmp_path: Path, dim: int, size: int, kind: str) -> None:
    torch.save({"state_dict": expected(naming=False), "epoch": 2}, tmp_path / "single")
    export_file(checkpoint, tmp_path / "file")
    export_folder(checkpoint, tmp_path / "folder", {}, ExportOptions(Naming(rename, transposed), shard_bytes=200))
    run_ranks(import_blocks, size, str(tmp_path / kind), dim, kind)


def test_names_that_do_not_match(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2), "b": torch.ones(2)}, tmp_path / "model.safetensors")
    asked = {"model.a": Piece.whole("a", torch.zeros(2)), "model.c": Piece.whole("c", torch.zeros(2))}
    with pytest.raises(CheckpointError, match=r"Missing in it: c \(for model\.c\)\. Without a place in the model: b"):
        import_safetensors(tmp_path, asked)
    certificate = import_safetensors(tmp_path, asked, ImportOptions(strict=False))
    assert (certificate.missing, certificate.unexpected) == (("model.c",), ("b",))
    with pytest.raises(CheckpointError, match=r"a is \(2,\).*\(3,\)"):
        import_safetensors(tmp_path, {"model.a": Piece.whole("a", torch.zeros(3))})


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="No safetensors file"):
        import_safetensors(tmp_path, {})
    (tmp_path / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0nonsense")
    with pytest.raises(CheckpointError, match="cannot be read"):
        import_safetensors(tmp_path, {})
    (tmp_path / "model.safetensors").rename(tmp_path / "other.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text('{"metadata": {}}')
    with pytest.raises(CheckpointError, match=r"its model.safetensors.index.json has no weight_map"):
        import_safetensors(tmp_path, {})
    (tmp_path / "model.safetensors.index.json").unlink()
    for name in ("other", "another"):
        save_file({"a": torch.ones(2)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(CheckpointError, match=r"a is in other.safetensors and in another file"):
        import_safetensors(tmp_path, {})
    save_file({"a": torch.ones(2, dtype=torch.int8)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"a is torch.int8: these are no weights .*The model has torch.float32"):
        import_safetensors(tmp_path, {"model.a": Piece.whole("a", torch.zeros(2))})
    torch.save({"state_dict": {}, "hyper_parameters": {"f": subprocess.run}}, tmp_path / "a.ckpt")
    with pytest.raises(CheckpointError, match="cannot be read as data"):
        import_single_file(tmp_path / "a.ckpt", {})
    torch.save({"weights": {}}, tmp_path / "a.ckpt")
    with pytest.raises(CheckpointError, match="no state_dict"):
        import_single_file(tmp_path / "a.ckpt", {})


def test_lightning_consolidates_the_folder(checkpoint: Path, tmp_path: Path) -> None:
    """Lightning's own tool makes a single-file checkpoint of it, with the module's state_dict where Lightning looks for it."""
    output = tmp_path / "one.ckpt"
    tool = [sys.executable, "-m", "lightning.pytorch.utilities.consolidate_checkpoint"]
    done = subprocess.run([*tool, str(checkpoint), "--output_file", str(output)], timeout=120, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = torch.load(output, weights_only=True)
    assert_equal(found["state_dict"], expected(naming=False))
    assert (found["epoch"], found["global_step"]) == (2, 9)
    assert torch.equal(found["optimizer"]["layer.bias"]["exp_avg"], WEIGHTS["optimizer.layer.bias.exp_avg"])
