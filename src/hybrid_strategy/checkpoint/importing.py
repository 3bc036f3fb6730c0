"""Starts from somebody else's weights: safetensors or a single-file Lightning checkpoint, each rank reading only its blocks."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed import ProcessGroup

from hybrid_strategy.checkpoint.agreement import Ranks, Work
from hybrid_strategy.checkpoint.certificate import Certificate
from hybrid_strategy.checkpoint.naming import Naming
from hybrid_strategy.checkpoint.pieces import Piece
from hybrid_strategy.errors import CheckpointError, message

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


@dataclass(frozen=True)
class ImportOptions:
    """How weights are imported.

    Attributes:
        naming: their names and layout in the files.
        strict: a key without a tensor in the files, or a tensor nobody asks for, is an error; otherwise it is named.
    """

    naming: Naming = field(default_factory=Naming)
    strict: bool = True


@dataclass(frozen=True)
class _Tensors:
    """Named tensors of which blocks can be read."""

    names: set[str]
    shape: Callable[[str], tuple[int, ...]]
    block: Callable[[str, tuple[slice, ...]], Tensor]


def import_safetensors(
    path: str | os.PathLike[str],
    tensors: Mapping[str, Piece],
    options: ImportOptions | None = None,
    process_group: ProcessGroup | None = None,
) -> Certificate:
    """Fills this rank's pieces from a safetensors file or a Hugging Face folder of them. Called by every rank of the group.

    Args:
        path: the file, or a folder with `model.safetensors.index.json` or safetensors files.
        tensors: the blocks to fill in place, by key; values are converted to their dtype.

    Raises:
        CheckpointError: on every rank: a file cannot be read, a shape differs, or names do not match (`strict`).
    """
    where = Path(os.path.abspath(path))

    def fill(options: ImportOptions) -> tuple[set[str], set[str], dict[str, str]]:
        with ExitStack() as stack:
            return _fill(_open_safetensors(where, stack), tensors, options)

    return _import(where, fill, options or ImportOptions(), Ranks.of(process_group))


def import_single_file(
    path: str | os.PathLike[str],
    tensors: Mapping[str, Piece],
    options: ImportOptions | None = None,
    process_group: ProcessGroup | None = None,
) -> tuple[dict[str, Any], Certificate]:
    """Fills this rank's pieces from the `state_dict` of a single-file Lightning checkpoint, read through a memory map.

    Returns:
        The rest of the file (loops, callbacks, optimizer states by parameter index, ...), and the account.

    Raises:
        CheckpointError: as `import_safetensors`; also if the file holds objects that are not data.
    """
    where = Path(os.path.abspath(path))
    rest: dict[str, Any] = {}

    def fill(options: ImportOptions) -> tuple[set[str], set[str], dict[str, str]]:
        found = read_single_file(where)
        weights: dict[str, Tensor] = found.pop("state_dict")
        rest.update(found)
        source = _Tensors(set(weights), lambda name: tuple(weights[name].shape), lambda name, part: weights[name][part])
        return _fill(source, tensors, options)

    certificate = _import(where, fill, options or ImportOptions(), Ranks.of(process_group))
    return rest, certificate


def _import(
    path: Path, fill: Callable[[ImportOptions], tuple[set[str], set[str], dict[str, str]]], options: ImportOptions, ranks: Ranks
) -> Certificate:
    work = Work(str(path), "import")
    gathered = ranks.collect(work, lambda: fill(options))
    return ranks.lead(work, lambda: _account(path, gathered or [], options.strict))


def _fill(source: _Tensors, tensors: Mapping[str, Piece], options: ImportOptions) -> tuple[set[str], set[str], dict[str, str]]:
    """Fills the pieces; returns the names there are, those used, and the keys without one."""
    used: set[str] = set()
    missing: dict[str, str] = {}
    for key, piece in tensors.items():
        name = options.naming.rename(key)
        if name is None:
            continue
        if name not in source.names:
            missing[key] = name
            continue
        used.add(name)
        _fill_piece(source, name, piece, options.naming.transposed(key), options.naming.part(key))
    return source.names, used, missing


def _fill_piece(source: _Tensors, name: str, piece: Piece, transposed: bool, part: tuple[int, int]) -> None:
    shape = source.shape(name)[::-1] if transposed else source.shape(name)
    index, count = part
    whole = piece.spec.full_shape
    wanted = (count * whole[0], *whole[1:]) if count > 1 else whole
    if shape != wanted:
        rule = "the shape in the file differs from the model's"
        raise CheckpointError(message(name, shape, rule, f"The model has {wanted}", ""))
    if piece.tensor.numel() == 0:
        return
    slices = piece.spec.slices
    if count > 1:
        rows, start = slices[0], index * whole[0]
        slices = (slice(start + rows.start, start + rows.stop), *slices[1:])
    block = source.block(name, slices[::-1] if transposed else slices)
    if piece.tensor.is_floating_point() and not block.is_floating_point():
        rule, numbers = "these are no weights but numbers that stand for some (quantised)", f"The model has {piece.tensor.dtype}"
        raise CheckpointError(message(name, block.dtype, rule, numbers, "Give weights in a floating-point type"))
    with torch.no_grad():
        piece.tensor.copy_(block.t() if transposed else block)


def _account(path: Path, gathered: list[tuple[set[str], set[str], dict[str, str]]], strict: bool) -> Certificate:
    used = set().union(*(each for _, each, _ in gathered))
    unexpected = sorted(set().union(*(names for names, _, _ in gathered)) - used)
    missing = dict(sorted(pair for _, _, each in gathered for pair in each.items()))
    if strict and (missing or unexpected):
        found = [f"Missing in it: {', '.join(f'{name} (for {key})' for key, name in missing.items())}"] if missing else []
        found += [f"Without a place in the model: {', '.join(unexpected)}"] if unexpected else []
        advice = "Set the weights of this model, or strict_loading=False to leave these out"
        raise CheckpointError(message("weights", str(path), "their names are not the model's", ". ".join(found), advice))
    certificate = Certificate(str(path), missing=tuple(missing), unexpected=tuple(unexpected))
    return certificate.with_restored("weights", f"{len(used)} tensors")


def names_in(path: str | os.PathLike[str]) -> set[str]:
    """The names of the tensors in a safetensors file or a folder of them. Reads headers only; not collective.

    Raises:
        CheckpointError: a file cannot be read.
    """
    with ExitStack() as stack:
        return _open_safetensors(Path(path), stack).names


def _open_safetensors(path: Path, stack: ExitStack) -> _Tensors:
    file_of: dict[str, Any] = {}
    try:
        for file in _files(path):
            opened = stack.enter_context(safe_open(file, framework="pt"))
            if twice := sorted(file_of.keys() & set(opened.keys())):
                raise ValueError(f"{twice[0]} is in {file.name} and in another file")
            file_of.update(dict.fromkeys(opened.keys(), opened))
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(message("weights", str(path), "they cannot be read", str(error), "")) from error
    except (KeyError, TypeError, AttributeError) as error:
        rule = f"its {_INDEX} has no weight_map that names a file for each tensor"
        raise CheckpointError(message("weights", str(path), rule, "", "Remove it where it is no longer true")) from error

    def block(name: str, part: tuple[slice, ...]) -> Tensor:
        found: Tensor = file_of[name].get_slice(name)[part] if part else file_of[name].get_tensor(name)
        return found

    return _Tensors(set(file_of), lambda name: tuple(file_of[name].get_slice(name).get_shape()), block)


def _files(path: Path) -> list[Path]:
    """The model's one file where there is one, as Hugging Face's library has it: an index beside it is an older one's. Else the
    files that the index names, else all safetensors files of the folder."""
    if path.is_file():
        return [path]
    if (path / _SINGLE).is_file():
        return [path / _SINGLE]
    if (path / _INDEX).is_file():
        return [path / name for name in sorted(set(json.loads((path / _INDEX).read_text())["weight_map"].values()))]
    found = sorted(path.glob("*.safetensors"))
    if not found:
        raise FileNotFoundError(f"No safetensors file in {path}")
    return found


def read_single_file(path: Path) -> dict[str, Any]:
    """A single-file Lightning checkpoint, its tensors read when they are looked at.

    Raises:
        CheckpointError: it cannot be read as data, or is no such file.
    """
    try:
        found = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # torch.load raises many kinds
        cause = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        raise CheckpointError(message("weights", str(path), "the file cannot be read as data", cause, "")) from error
    if not isinstance(found, dict) or not isinstance(found.get("state_dict"), dict):
        raise CheckpointError(message("weights", str(path), "the file has no state_dict", "", "Set a Lightning checkpoint"))
    return found
