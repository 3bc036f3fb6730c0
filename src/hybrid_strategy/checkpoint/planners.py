"""How torch's distributed checkpoint sees pieces: what each rank writes, and what it reads to fill its blocks."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from hybrid_strategy.checkpoint.pieces import Piece, key_path
from hybrid_strategy.errors import CheckpointError, message
from hybrid_strategy.spec.shard import ShardSpec


class PieceSavePlanner(DefaultSavePlanner):
    """Plans the writing of pieces.

    Every holder of a block offers it and torch's planner gives it to the holder with the least to write, so that replicas share
    the work; with `owners_only` the owners write everything (for replicas that may differ).
    """

    def __init__(self, pieces: dict[str, Piece], owners_only: bool = False) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._pieces = pieces
        self._tensors = {key: piece.tensor for key, piece in pieces.items()}
        self._owners_only = owners_only

    def create_local_plan(self) -> SavePlan:
        items = [_write_item(key, piece) for key, piece in self._pieces.items() if self._offers(piece)]
        self.plan = SavePlan(items, planner_data=tuple(self._pieces))
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Raises:
        CheckpointError: the blocks of all ranks together are not the whole of some tensor.
        """
        _check_declarations(all_plans)
        try:
            plans, metadata = super().create_global_plan(all_plans)
        except ValueError as error:  # torch's text names the tensors and the numbers
            rule = "the blocks of all ranks together must be each tensor once"
            raise CheckpointError(message("checkpoint", "its tensors", rule, str(error), "")) from error
        _check_cover(metadata)
        paths = {key: key_path(key) for key in metadata.state_dict_metadata}
        return plans, dataclasses.replace(metadata, planner_data=paths)

    def hold(self, tensors: dict[str, Tensor]) -> None:
        """Writes these instead of the pieces' own tensors, and lets go of those."""
        self._tensors, self._pieces = tensors, {}

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self._tensors[index.fqn]

    def _offers(self, piece: Piece) -> bool:
        return not piece.empty_share and (piece.spec.owner or not self._owners_only)


class PieceLoadPlanner(DefaultLoadPlanner):
    """Plans the reading of this rank's blocks out of whatever blocks were saved. Keys that were not saved are left alone."""

    def __init__(self, pieces: Mapping[str, Piece]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.pieces = pieces

    def plan(self, metadata: Metadata) -> LoadPlan:
        """Raises:
        CheckpointError: a tensor was saved with another shape.
        """
        items: list[ReadItem] = []
        for key, piece in self.pieces.items():
            saved = metadata.state_dict_metadata.get(key)
            if saved is not None:
                items += _read_items(key, piece, saved)
        return LoadPlan(items)

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        raise CheckpointError(
            message("checkpoint", read_item.dest_index.fqn, "it holds an object where a tensor belongs", "", "")
        )

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self.pieces[index.fqn].tensor


def _write_item(key: str, piece: Piece) -> WriteItem:
    offsets = torch.Size(piece.spec.offsets)
    data = TensorWriteData(
        chunk=_chunk(piece.spec),
        properties=TensorProperties(dtype=piece.tensor.dtype),
        size=torch.Size(piece.spec.full_shape),
    )
    return WriteItem(index=MetadataIndex(key, offsets), type=WriteItemType.SHARD, tensor_data=data)


def _read_items(key: str, piece: Piece, saved: Any) -> list[ReadItem]:
    if not isinstance(saved, TensorStorageMetadata):
        raise CheckpointError(message(key, "an object", "a tensor is expected", "", ""))
    if tuple(saved.size) != piece.spec.full_shape:
        rule = "the shape in the checkpoint differs from the model's"
        advice = "Load it into the model it was saved from"
        raise CheckpointError(message(key, tuple(saved.size), rule, f"The model has {piece.spec.full_shape}", advice))
    if piece.tensor.numel() == 0:  # torch counts an empty block as overlapping its neighbours
        return []
    return create_read_items_for_chunk_list(key, saved, [_chunk(piece.spec)])


def _chunk(spec: ShardSpec) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(spec.offsets), sizes=torch.Size(spec.sizes))


def _check_declarations(plans: list[SavePlan]) -> None:
    """All ranks must mean the same tensor by a key, and every key must be offered by someone."""
    declared: dict[str, TensorWriteData] = {}
    for item in (item for plan in plans for item in plan.items):
        data = item.tensor_data
        if data is None:
            continue
        first = declared.setdefault(item.index.fqn, data)
        if (first.size, first.properties.dtype) != (data.size, data.properties.dtype):
            numbers = f"Another rank has {tuple(data.size)} {data.properties.dtype}"
            shown = f"{tuple(first.size)} {first.properties.dtype}"
            raise CheckpointError(f"{item.index.fqn} is {shown}: the ranks declare it differently. {numbers}.")
    for key in (key for plan in plans for key in plan.planner_data or ()):
        if key not in declared:
            raise CheckpointError(message("checkpoint", key, "no rank holds a block of this tensor to write", "", ""))


def _check_cover(metadata: Metadata) -> None:
    """Torch checks this for several ranks only."""
    for key, saved in metadata.state_dict_metadata.items():
        if isinstance(saved, TensorStorageMetadata):
            held = sum(math.prod(chunk.sizes) for chunk in saved.chunks)
            if held != math.prod(saved.size):
                rule = "the blocks of all ranks together must be the whole tensor"
                raise CheckpointError(message(key, tuple(saved.size), rule, f"They hold {held} of its elements", ""))
