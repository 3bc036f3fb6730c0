"""A module of its own out of a checkpoint folder, without a Trainer: what `load_from_checkpoint` does for single files."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any, TypeVar

import lightning.pytorch as pl
import torch

from hybrid_strategy.checkpoint.content import SmallState
from hybrid_strategy.checkpoint.export import ExportReport
from hybrid_strategy.checkpoint.loading import LoadedState, load_checkpoint, saved_names
from hybrid_strategy.checkpoint.pieces import MODEL, Piece, section
from hybrid_strategy.errors import CheckpointError, message
from hybrid_strategy.strategy.checkpointing import ALIASES, EXTRA, RUN_STATE
from hybrid_strategy.strategy.own_states import ADDED

Module = TypeVar("Module", bound=pl.LightningModule)
_OF_TRAINING = ("optimizer_states", "lr_schedulers", RUN_STATE)


def load_from_checkpoint(kind: type[Module], path: str | os.PathLike[str], **arguments: Any) -> Module:
    """A module with the weights and the hyper-parameters of a checkpoint, on the CPU, for this process alone.

    `kind.load_from_checkpoint` reads single files, and a checkpoint of this strategy is a folder. Everything else is Lightning's:
    `save_hyperparameters`, `on_load_checkpoint`, `strict`. Where the run averaged its weights, it is their average.

    Memory: the weights three times while they are read; `hybrid export` writes a file with one tensor in memory at a time.

    Args:
        kind: the LightningModule.
        path: a checkpoint folder, or a single file.
        arguments: as for `kind.load_from_checkpoint`: `map_location`, `strict`, arguments of `kind`.

    Raises:
        CheckpointError: the folder is damaged, or there is none.
    """
    where = Path(path).expanduser()
    if where.is_file():
        return kind.load_from_checkpoint(where, **arguments)
    buffer = io.BytesIO()
    torch.save(single_file(where), buffer)
    buffer.seek(0)
    return kind.load_from_checkpoint(buffer, **{"weights_only": True, **arguments})


def single_file(path: Path) -> dict[str, Any]:
    """What a single file of Lightning, saved with weights only, would hold.

    Raises:
        CheckpointError: the folder is damaged, or there is none.
    """
    if not path.is_dir():
        raise CheckpointError(message("checkpoint", str(path), "there is no such file or folder", "", "Set the path of one"))
    saved = {key: each for key, each in saved_names(path).items() if section(key) == MODEL}
    pieces = {key: Piece.whole(key, torch.empty(each.shape, dtype=each.dtype)) for key, each in saved.items()}
    loaded: LoadedState = load_checkpoint(path, pieces)
    weights: dict[str, Any] = {key.partition(".")[2]: piece.tensor for key, piece in pieces.items()}
    weights |= _named_otherwise(loaded.small, weights)
    kept = {key: value for key, value in loaded.small.state.items() if key not in _OF_TRAINING}
    return {**kept, "state_dict": weights}


def write_single_file(path: Path, file: Path, dtype: torch.dtype | None = None) -> ExportReport:
    """Writes what `single_file` gives; the file appears when it is complete.

    Args:
        dtype: convert floating-point weights to this; None keeps each.

    Raises:
        CheckpointError: the folder is damaged.
    """
    content, beside = single_file(path), file.with_name(f"{file.name}.partial")
    weights = content["state_dict"]
    if dtype is not None:
        floating = {name: each for name, each in weights.items() if torch.is_tensor(each) and each.is_floating_point()}
        weights |= {name: each.to(dtype) for name, each in floating.items()}
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        torch.save(content, beside)
        beside.replace(file)
    finally:
        beside.unlink(missing_ok=True)
    left_out = tuple(key for key in saved_names(path) if section(key) != MODEL)
    return ExportReport(str(file), {file.name: tuple(weights)}, file.stat().st_size, left_out)


def _named_otherwise(small: SmallState, weights: dict[str, Any]) -> dict[str, Any]:
    """Further names of shared weights, what hooks added, and extra states under the names that torch gives them."""
    aliases: Any = small.meta.get(ALIASES) or {}
    found = {alias: weights[name] for alias, name in aliases.items() if name in weights}
    for key, value in small.replicated.items():
        if section(key) == ADDED:
            found[key.partition(".")[2]] = value
        elif section(key) == EXTRA:
            name = key.partition(".")[2]
            found[f"{name}._extra_state" if name else "_extra_state"] = value
    return found
