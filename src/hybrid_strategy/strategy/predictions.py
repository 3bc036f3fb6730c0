"""What `trainer.predict` returns on rank 0: every row of the data once, in the data's order, as one process returns it.

A step's block of rows lies over the data-parallel ranks in order, so joining their outputs rank by rank gives the block's
output. Tensor- and pipeline-parallel copies are left out, and so are rows of padding. The other ranks keep their own share.
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.callbacks import BasePredictionWriter

from hybrid_strategy.distributed.groups import Groups
from hybrid_strategy.strategy import _lightning
from hybrid_strategy.strategy.loaders import brought
from hybrid_strategy.strategy.outputs import combine_outputs


def gather_predictions(trainer: pl.Trainer, groups: Groups) -> None:
    """Completes rank 0's predictions in place; a collective call."""
    if groups.layout.data_parallel_size == 1 or not trainer.predict_loop.return_predictions:
        return
    for loader, predictions in enumerate(_lightning.stored_predictions(trainer)):
        rows = [_rows_of(trainer, loader, index) for index in range(len(predictions))]
        predictions[:] = _gathered(predictions, rows, groups)


def keep_padding_from(writer: BasePredictionWriter) -> None:
    """Lets `writer` see no batch of padding, as Lightning's own strategies make none to predict with."""

    def on_predict_batch_end(trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, index: int, loader: int = 0) -> None:
        if _rows_of(trainer, loader, index):
            type(writer).on_predict_batch_end(writer, trainer, module, outputs, batch, index, loader)

    def on_predict_epoch_end(trainer: pl.Trainer, module: Any) -> None:
        lists = (_lightning.stored_predictions(trainer), trainer.predict_loop.epoch_batch_indices)
        kept = [(each, list(each), loader) for some in lists for loader, each in enumerate(some)]
        for each, everything, loader in kept:
            each[:] = [value for index, value in enumerate(everything) if _rows_of(trainer, loader, index)]
        try:
            type(writer).on_predict_epoch_end(writer, trainer, module)
        finally:
            for each, everything, _ in kept:
                each[:] = everything

    vars(writer).update(on_predict_batch_end=on_predict_batch_end, on_predict_epoch_end=on_predict_epoch_end)


def _rows_of(trainer: pl.Trainer, loader: int, batch: int) -> int:
    """Rows of a batch of this rank that are no padding; 1 where that is not known."""
    mesh = getattr(list(brought(trainer.predict_dataloaders, None))[loader][0], "mesh", None)
    return 1 if mesh is None else int(mesh.rows_of(batch))


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
