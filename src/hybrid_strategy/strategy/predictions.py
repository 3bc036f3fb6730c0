"""What `trainer.predict` returns on rank 0: every row of the data once, in the data's order, as one process returns it.

A step's block of rows lies over the data-parallel ranks in order, so joining their outputs rank by rank gives the block's
output. Tensor- and pipeline-parallel copies are left out, and so are rows of padding. The other ranks keep their own share.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist

from hybrid_strategy.distributed.groups import Groups
from hybrid_strategy.strategy import _lightning
from hybrid_strategy.strategy.outputs import combine_outputs


def gather_predictions(trainer: pl.Trainer, groups: Groups) -> None:
    """Completes rank 0's predictions in place; a collective call."""
    if groups.layout.data_parallel_size == 1 or not trainer.predict_loop.return_predictions:
        return
    loaders: Any = trainer.predict_dataloaders
    loaders = loaders if isinstance(loaders, Sequence) else [loaders]
    for loader, predictions in zip(loaders, _lightning.stored_predictions(trainer), strict=True):
        mesh = getattr(loader, "mesh", None)
        rows = [1 if mesh is None else mesh.rows_of(index) for index in range(len(predictions))]
        predictions[:] = _gathered(predictions, rows, groups)


def _gathered(predictions: list[Any], rows: list[int], groups: Groups) -> list[Any]:
    mine = [each for each, count in zip(predictions, rows, strict=True) if count > 0]
    coordinate = groups.coordinate
    if coordinate.pipeline_parallel or coordinate.tensor_parallel or coordinate.context_parallel:
        return mine
    is_first = coordinate.data_parallel == 0
    whole = []
    for prediction, count in zip(predictions, rows, strict=True):  # batch by batch: rank 0 never holds two copies of all
        parts: list[Any] | None = [None] * groups.layout.data_parallel_size if is_first else None
        dist.gather_object((count, prediction), parts, group=groups.data, group_dst=0)
        if parts is not None:
            real = [(size, part) for size, part in parts if size > 0]
            whole.append(combine_outputs([part for _, part in real], [size for size, _ in real]))
    return whole if is_first else mine
