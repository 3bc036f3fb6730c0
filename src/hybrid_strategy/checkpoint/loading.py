"""Reads a checkpoint of any layout into the pieces of any other."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from hybrid_strategy.checkpoint.agreement import Ranks, Work
from hybrid_strategy.checkpoint.certificate import Certificate
from hybrid_strategy.checkpoint.content import SmallState, read_small_state
from hybrid_strategy.checkpoint.folder import resolve
from hybrid_strategy.checkpoint.manifest import check_files, read_manifest
from hybrid_strategy.checkpoint.pieces import MODEL, Piece, count_sections, section
from hybrid_strategy.checkpoint.planners import PieceLoadPlanner
from hybrid_strategy.checkpoint.storage import BlockReader, read_index
from hybrid_strategy.errors import CheckpointError, message


@dataclass(frozen=True)
class LoadOptions:
    """How a checkpoint is read.

    Attributes:
        digests: compare every file's digest before anything is changed (the ranks share the reading); sizes always are.
        strict: a weight (`model.*`) that is missing or has no place is an error; otherwise it is only named.
        instead: keys to read weights from, each with the `model.*` key whose place it takes.
    """

    digests: bool = True
    strict: bool = True
    instead: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class LoadedState:
    """What was read beside the tensors, and the account of it."""

    small: SmallState
    certificate: Certificate


class _Asked(NamedTuple):
    """What one rank asks for."""

    keys: list[str]
    instead: dict[str, str]


@dataclass(frozen=True)
class SavedTensor:
    """A whole tensor of a checkpoint."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def saved_names(path: str | os.PathLike[str]) -> dict[str, SavedTensor]:
    """The tensors of a checkpoint by key: what to allocate before loading. Reads the index only; not collective.

    Raises:
        CheckpointError: there is no readable checkpoint.
    """
    return _saved_tensors(read_index(resolve(Path(path))))


def load_checkpoint(
    path: str | os.PathLike[str],
    tensors: Mapping[str, Piece],
    options: LoadOptions | None = None,
    process_group: ProcessGroup | None = None,
) -> LoadedState:
    """Fills this rank's pieces from a checkpoint of any layout. Called by every rank of the group.

    Values are converted to the dtype of the piece they go to. Keys that the checkpoint lacks are left alone and named. No
    tensor is changed before the files are verified on all ranks.

    Args:
        tensors: the blocks to fill in place, by key. Sections of the checkpoint of which no rank asks for a key are not read.
        process_group: None is the default group; one process without torch.distributed reads alone.

    Raises:
        CheckpointError: on every rank: a file is missing, truncated or altered, a shape differs, or a weight is missing or has
            no place (`strict`).
    """
    options, ranks, folder = options or LoadOptions(), Ranks.of(process_group), resolve(Path(os.path.abspath(path)))
    work = Work(str(folder), "load")
    asked = ranks.collect(work, lambda: _verify(folder, tensors, options, ranks))
    certificate = ranks.lead(work, lambda: _compare(folder, asked or [], options.strict))
    read: list[SmallState] = []
    ranks.collect(work, lambda: read.append(_read(folder, tensors)))
    return LoadedState(read[0], _certify(certificate, read[0]))


def read_whole(path: str | os.PathLike[str], key: str) -> Tensor:
    """One whole tensor of a checkpoint, on the host. Not collective; digests are not compared.

    Raises:
        CheckpointError: there is no readable checkpoint.
        KeyError: it has no such tensor.
    """
    folder = resolve(Path(path))
    saved = saved_names(folder)[key]
    piece = Piece.whole(key, torch.empty(saved.shape, dtype=saved.dtype))
    _fill(folder, {key: piece})
    return piece.tensor


def _verify(folder: Path, tensors: Mapping[str, Piece], options: LoadOptions, ranks: Ranks) -> _Asked:
    check_files(folder, read_manifest(folder), (ranks.rank, ranks.size), options.digests)
    PieceLoadPlanner(tensors).plan(read_index(folder))
    return _Asked(list(tensors), dict(options.instead))


def _compare(folder: Path, asked: list[_Asked], strict: bool) -> Certificate:
    """What the ranks together ask for, against what there is."""
    wanted, saved = {key for each in asked for key in each.keys}, _saved_tensors(read_index(folder))
    instead = {key: other for each in asked for key, other in each.instead.items()}
    sections = count_sections(wanted)
    missing = sorted(wanted - saved.keys())
    replaced = {other for key, other in instead.items() if key in saved}
    unexpected = sorted(key for key in saved.keys() - wanted - replaced if section(key) in sections)
    if strict:
        weights = [key for key in missing if section(key) == MODEL or key in instead]
        refuse_weights(folder, weights, [key for key in unexpected if section(key) == MODEL])
    certificate = Certificate(str(folder), missing=tuple(missing), unexpected=tuple(unexpected))
    for name, count in count_sections(wanted & saved.keys()).items():
        certificate = certificate.with_restored(name, f"{count} of {sections[name]} tensors")
    for name, count in count_sections(saved.keys() - replaced).items():
        if name not in sections:
            certificate = certificate.with_not_restored(name, f"its {count} tensors were not asked for")
    return certificate


def refuse_weights(folder: Path, absent: Sequence[str], surplus: Sequence[str]) -> None:
    """Raises:
    CheckpointError: there are weights missing, or without a place.
    """
    if absent or surplus:
        found = [f"Missing in it: {', '.join(absent)}"] if absent else []
        found += [f"Without a place in the model: {', '.join(surplus)}"] if surplus else []
        rule = "its weights are not the model's"
        advice = "Load it into the model it was saved from, or load with strict=False"
        raise CheckpointError(message("checkpoint", str(folder), rule, ". ".join(found), advice))


def _read(folder: Path, tensors: Mapping[str, Piece]) -> SmallState:
    _fill(folder, tensors)
    return read_small_state(folder)


def _fill(folder: Path, tensors: Mapping[str, Piece]) -> None:
    planner, reader = PieceLoadPlanner(tensors), BlockReader(folder)
    index = reader.read_metadata()
    reader.set_up_storage_reader(index, is_coordinator=False)
    with torch.no_grad():
        reader.read_data(planner.plan(index), planner).wait()


def _certify(certificate: Certificate, small: SmallState) -> Certificate:
    for line in small.unsaved:
        where, _, kind = line.partition(": ")
        certificate = certificate.with_not_restored(where, f"it was not saved: {kind} is not data")
    return certificate


def _saved_tensors(index: Metadata) -> dict[str, SavedTensor]:
    return {
        key: SavedTensor(tuple(saved.size), saved.properties.dtype)
        for key, saved in index.state_dict_metadata.items()
        if isinstance(saved, TensorStorageMetadata)
    }
