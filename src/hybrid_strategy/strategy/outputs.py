"""What a user's step returned, micro-batch by micro-batch, made into what one call would have returned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hybrid_strategy.errors import ConfigError, message


@dataclass(frozen=True)
class StepLoss:
    """The loss of one micro-batch and how many rows or tokens it is the mean of."""

    loss: Tensor
    weight: float
    counts_tokens: bool


def read_loss(output: Any, rows: float) -> StepLoss:
    """The loss that a `training_step` returned: a tensor, or a mapping with `loss` and perhaps `num_tokens`.

    Raises:
        ConfigError: there is no loss in it.
    """
    if isinstance(output, Tensor):
        return StepLoss(output, rows, False)
    if isinstance(output, Mapping) and isinstance(output.get("loss"), Tensor):
        tokens = output.get("num_tokens")
        if tokens is None:
            return StepLoss(output["loss"], rows, False)
        return StepLoss(output["loss"], float(tokens), True)
    raise ConfigError(
        message(
            "training_step",
            type(output).__name__,
            "it must return the loss as a tensor, or a dict with the key 'loss'",
            "a step that is skipped on one rank would leave the others waiting",
            "Return a loss; to skip samples give them weight zero",
        )
    )


def combine_outputs(outputs: Sequence[Any], rows: Sequence[int]) -> Any:
    """One value for the whole batch: tensors with a row per sample are joined, other tensors averaged by rows.

    Mappings, lists and tuples are combined item by item; anything else is returned as a list, one item a micro-batch.
    """
    first = outputs[0]
    if len(outputs) == 1:
        return first
    if isinstance(first, Tensor):
        return _combine_tensors(list(outputs), rows)
    if isinstance(first, Mapping):
        return {key: combine_outputs([output[key] for output in outputs], rows) for key in first}
    if isinstance(first, (list, tuple)) and all(len(output) == len(first) for output in outputs):
        if len(first) == rows[0] and not any(isinstance(item, Tensor) for item in first):
            return type(first)(item for output in outputs for item in output)
        return type(first)(combine_outputs(list(items), rows) for items in zip(*outputs, strict=True))
    if first is None:
        return None
    return list(outputs)


def _combine_tensors(tensors: list[Tensor], rows: Sequence[int]) -> Tensor:
    if all(tensor.dim() > 0 and tensor.shape[0] == count for tensor, count in zip(tensors, rows, strict=True)):
        return torch.cat(tensors)
    if not tensors[0].is_floating_point():
        return torch.stack(tensors)
    weights = torch.tensor(rows, dtype=tensors[0].dtype, device=tensors[0].device)
    mean: Tensor = torch.tensordot(weights / weights.sum(), torch.stack(tensors), dims=1)
    return mean
