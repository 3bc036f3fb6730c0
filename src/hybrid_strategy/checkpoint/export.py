"""Turns a checkpoint into safetensors files, one tensor in memory at a time.

File format: https://huggingface.co/docs/safetensors (8 bytes of header length, JSON header padded with spaces, data). The
library's own writer needs every tensor of a file at once; the format is simple enough to write one after another.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybrid_strategy.checkpoint.digests import DigestFile, write_bytes, write_file
from hybrid_strategy.checkpoint.folder import check_holds_only, commit, remove_folder, resolve, start_partial
from hybrid_strategy.checkpoint.naming import Naming
from hybrid_strategy.checkpoint.pieces import Piece
from hybrid_strategy.checkpoint.planners import PieceLoadPlanner
from hybrid_strategy.checkpoint.storage import BlockReader
from hybrid_strategy.checkpoint.verify import verify_checkpoint
from hybrid_strategy.errors import CheckpointError, message

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


_INDEX = "model.safetensors.index.json"
_WRITTEN = ("config.json", "model.safetensors", "model-*-of-*.safetensors", _INDEX)
"""What an earlier export may have left in a folder; there may be a tokenizer beside it, which is not ours to remove."""


@dataclass(frozen=True)
class ExportOptions:
    """How weights are exported.

    Attributes:
        naming: their names and layout in the files.
        dtype: convert floating-point tensors to this; None keeps each.
        shard_bytes: largest size of one file of a folder; a tensor that is larger gets a file of its own.
        digests: verify every file of the checkpoint first.
    """

    naming: Naming = field(default_factory=Naming)
    dtype: torch.dtype | None = None
    shard_bytes: int = 5 * 10**9
    digests: bool = True


@dataclass(frozen=True)
class ExportReport:
    """What was exported: files by name with the tensors in them, and the keys that have no place there."""

    path: str
    files: dict[str, tuple[str, ...]]
    num_bytes: int
    left_out: tuple[str, ...]


@dataclass(frozen=True)
class _Entry:
    """One tensor to export: its keys in the checkpoint, joined along their first dimension; its name, shape, dtype there."""

    keys: tuple[str, ...]
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    transposed: bool

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class _Source:
    """Reads whole tensors out of a checkpoint, one by one."""

    def __init__(self, path: str | os.PathLike[str], options: ExportOptions) -> None:
        self.folder = resolve(Path(path))
        verify_checkpoint(self.folder, options.digests)
        self.reader = BlockReader(self.folder)
        self.index = self.reader.read_metadata()
        self.reader.set_up_storage_reader(self.index, is_coordinator=True)
        self.left_out: list[str] = []
        named: dict[str, dict[int, str]] = {}
        for key in sorted(self.index.state_dict_metadata):
            self._name(key, options.naming, named)
        self.entries = [self._entry(name, parts, options) for name, parts in sorted(named.items())]

    def read(self, entry: _Entry) -> Tensor:
        """The tensor as it is to be written, contiguous on the host."""
        parts = [self._whole(key) for key in entry.keys]
        tensor = parts[0] if len(parts) == 1 else torch.cat(parts)
        return (tensor.t() if entry.transposed else tensor).to(entry.dtype).contiguous()

    def _whole(self, key: str) -> Tensor:
        saved: Any = self.index.state_dict_metadata[key]
        piece = Piece.whole(key, torch.empty(saved.size, dtype=saved.properties.dtype))
        planner = PieceLoadPlanner({key: piece})
        self.reader.read_data(planner.plan(self.index), planner).wait()
        return piece.tensor

    def _name(self, key: str, naming: Naming, named: dict[str, dict[int, str]]) -> None:
        name = naming.rename(key)
        if name is None:
            self.left_out.append(key)
            return
        index, parts = naming.part(key)[0], named.setdefault(name, {})
        if index in parts:
            rule = "two tensors would have this name"
            advice = "Let rename return None for one of them"
            raise CheckpointError(message("exported name", name, rule, f"They are {parts[index]} and {key}", advice))
        parts[index] = key

    def _entry(self, name: str, parts: dict[int, str], options: ExportOptions) -> _Entry:
        keys = tuple(key for _, key in sorted(parts.items()))
        count = options.naming.part(keys[0])[1]
        if len(keys) != count:
            numbers = f"It is made of {count} tensors, of which the checkpoint has {', '.join(keys)}"
            raise CheckpointError(message("exported name", name, "a part of it is missing", numbers, ""))
        saved: Any = self.index.state_dict_metadata[keys[0]]
        dtype, shape = saved.properties.dtype, tuple(saved.size)
        if options.dtype is not None and dtype.is_floating_point:
            dtype = options.dtype
        if dtype not in _DTYPES:
            raise CheckpointError(message(keys[0], dtype, "safetensors has no such dtype", "", "Set dtype"))
        if count > 1:
            shape = (count * shape[0], *shape[1:])
        transposed = options.naming.transposed(keys[0])
        return _Entry(keys, name, shape[::-1] if transposed else shape, dtype, transposed)


def export_file(
    checkpoint: str | os.PathLike[str], file: str | os.PathLike[str], options: ExportOptions | None = None
) -> ExportReport:
    """Writes the weights of a checkpoint as one safetensors file. One process; the file appears when it is complete.

    Memory: the largest tensor twice (as saved and as written), one that is joined of several three times.

    Raises:
        CheckpointError: the checkpoint is damaged, or two of its tensors would have one name.
    """
    options, target = options or ExportOptions(), Path(os.path.abspath(file))
    source = _Source(checkpoint, options)
    target.parent.mkdir(parents=True, exist_ok=True)
    beside = target.with_name(target.name + ".partial")
    try:
        num_bytes = _write_safetensors(beside, source, source.entries)
        beside.replace(target)
    finally:
        beside.unlink(missing_ok=True)
    return ExportReport(str(target), {target.name: _names(source.entries)}, num_bytes, tuple(source.left_out))


def export_folder(
    checkpoint: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    config: dict[str, Any],
    options: ExportOptions | None = None,
) -> ExportReport:
    """Writes a Hugging Face folder: `config.json` and one safetensors file, or several and their index.

    One process; the folder appears when it is complete. Memory: the largest tensor twice.

    Args:
        config: what `config.json` holds.

    Raises:
        CheckpointError: as `export_file`; also if the folder exists and is neither empty nor an earlier export.
    """
    options, target = options or ExportOptions(), Path(os.path.abspath(folder))
    check_holds_only(target, _WRITTEN)
    source = _Source(checkpoint, options)
    shards = _cut_into_shards(source.entries, options.shard_bytes)
    partial = start_partial(target)
    try:
        num_bytes = sum(_write_safetensors(partial / name, source, entries) for name, entries in shards.items())
        if len(shards) > 1:
            write_bytes(partial / _INDEX, _index(shards))
        write_bytes(partial / "config.json", json.dumps(config, indent=2).encode())
        commit(partial, target)
    except BaseException:
        remove_folder(partial)
        raise
    return ExportReport(str(target), {name: _names(each) for name, each in shards.items()}, num_bytes, tuple(source.left_out))


def _write_safetensors(path: Path, source: _Source, entries: list[_Entry]) -> int:
    def fill(file: DigestFile) -> None:
        file.write(_header(entries))
        for entry in entries:
            file.write(source.read(entry).reshape(-1).view(torch.uint8).numpy())

    return write_file(path, fill).num_bytes


def _header(entries: list[_Entry]) -> bytes:
    described: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for entry in entries:
        end = start + entry.num_bytes
        described[entry.name] = {"dtype": _DTYPES[entry.dtype], "shape": list(entry.shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _cut_into_shards(entries: list[_Entry], shard_bytes: int) -> dict[str, list[_Entry]]:
    """Files by name, filled in order; named as Hugging Face names them."""
    shards: list[list[_Entry]] = [[]]
    for entry in entries:
        if shards[-1] and sum(each.num_bytes for each in shards[-1]) + entry.num_bytes > shard_bytes:
            shards.append([])
        shards[-1].append(entry)
    if len(shards) == 1:
        return {"model.safetensors": shards[0]}
    return {f"model-{number:05d}-of-{len(shards):05d}.safetensors": each for number, each in enumerate(shards, 1)}


def _index(shards: dict[str, list[_Entry]]) -> bytes:
    total = sum(entry.num_bytes for entries in shards.values() for entry in entries)
    weight_map = {entry.name: name for name, entries in shards.items() for entry in entries}
    return json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2).encode()


def _names(entries: list[_Entry]) -> tuple[str, ...]:
    return tuple(entry.name for entry in entries)
