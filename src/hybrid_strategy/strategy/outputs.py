"""What a user's step returned, micro-batch by micro-batch, made into what one call would have returned."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor

from hybrid_strategy.distributed.groups import Groups
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


_ADDED = ("AddBackward", "SubBackward", "NegBackward", "ToCopyBackward", "ViewBackward")
_REDUCED_BY_SUM = 2
"""What autograd keeps of `reduction="sum"` in torch's losses."""


def sums_over_rows(node: Any, rows: int) -> bool:
    """Does the graph of a loss show that it, or a summand of it, is a sum over its rows? A sum divided by anything is none.

    >>> scores = torch.zeros(4, 3, requires_grad=True)
    >>> sums_over_rows((scores**2).sum().grad_fn, 4), sums_over_rows((scores**2).mean().grad_fn, 4)
    (True, False)
    """
    todo = [node]
    while todo:
        each = todo.pop()
        name = "" if each is None else each.name()
        sizes = each._saved_self_sym_sizes if name.startswith("SumBackward") else ()
        if getattr(each, "_saved_reduction", None) == _REDUCED_BY_SUM or sizes[:1] == (rows,):
            return True
        todo += [below for below, _ in each.next_functions] if name.startswith(_ADDED) else []
    return False


def warn_of_sum(loss: Tensor, rows: Sequence[int], groups: Groups) -> None:
    """Tells the user, once for all ranks, where a loss that is a sum is taken as a mean.

    Args:
        rows: those of each micro-batch; the loss is that of the first.
    """
    layout, here = groups.layout, groups.coordinate
    parts = len(rows) * layout.data_parallel_size
    speaks = here.data_parallel == here.tensor_parallel == here.context_parallel == 0
    if parts > 1 and speaks and rows[0] and sums_over_rows(loss.grad_fn, rows[0]):
        warnings.warn(
            "the loss of training_step is a sum over its rows, and is taken as a mean: those of "
            f"{len(rows)} micro-batches and {layout.data_parallel_size} data-parallel ranks are averaged, so it and its "
            f"gradients are 1/{parts} of what one process has for the same samples. Return the mean over rows, or "
            "{'loss': mean over tokens, 'num_tokens': their number}.",
            stacklevel=2,
        )


def token_count(output: Any) -> float | None:
    """`num_tokens` of a step's output, or `None`."""
    tokens = output.get("num_tokens") if isinstance(output, Mapping) else None
    return None if tokens is None else float(tokens)


def combine_outputs(outputs: Sequence[Any], rows: Sequence[int]) -> Any:
    """What one call for the whole batch would have returned, from what the calls for its micro-batches did.

    Tensors, arrays and lists with an item per sample are joined; other tensors and floats are averaged, by tokens where the
    outputs have `num_tokens`, else by rows; `num_tokens` is summed; containers are combined item by item and keep their types.
    What is the same in all micro-batches stays so; anything else becomes a list, one item a micro-batch.
    """
    if len(outputs) == 1:
        return outputs[0]
    tokens = [token_count(each) for each in outputs]
    weights = [float(count) for count in rows] if None in tokens else [each or 0.0 for each in tokens]
    return _combine(list(outputs), _Shares(list(rows), weights), "")


@dataclass(frozen=True)
class _Shares:
    rows: list[int]
    weights: list[float]


def _combine(values: list[Any], shares: _Shares, key: str) -> Any:
    first = values[0]
    if isinstance(first, Tensor):
        return _combine_tensors(values, shares, key)
    if key == "num_tokens":
        return sum(values)
    if isinstance(first, numpy.ndarray) and _per_row([each.shape[:1] for each in values], shares):
        return numpy.concatenate(values)
    if isinstance(first, Mapping):
        items = {name: _combine([each[name] for each in values], shares, str(name)) for name in first}
        return items if type(first) is dict else _rebuilt(first, items)
    if isinstance(first, tuple) and hasattr(first, "_fields"):
        return type(first)(*(_combine(list(items), shares, "") for items in zip(*values, strict=True)))
    if isinstance(first, (list, tuple)):
        return _combine_sequences(values, shares)
    if dataclasses.is_dataclass(first) and not isinstance(first, type):
        names = [each.name for each in dataclasses.fields(first) if each.init]
        return dataclasses.replace(
            first, **{name: _combine([getattr(each, name) for each in values], shares, name) for name in names}
        )
    return _combine_plain(values, shares)


def _combine_plain(values: list[Any], shares: _Shares) -> Any:
    if values[0] is None or (isinstance(values[0], (int, str, bytes, float)) and all(each == values[0] for each in values)):
        return values[0]
    numbers = [each for each in values if isinstance(each, float)]
    total = math.fsum(shares.weights)
    if len(numbers) == len(values) and total:
        return math.fsum(each * weight for each, weight in zip(numbers, shares.weights, strict=True)) / total
    return values


def _combine_sequences(values: list[Any], shares: _Shares) -> Any:
    first = values[0]
    tensors = [item for item in first if isinstance(item, Tensor)]
    batched = all(_has_rows(item, shares.rows[0]) for item in tensors) and len(tensors) == len(first)
    mixed = bool(tensors) and (isinstance(first, tuple) or len(tensors) < len(first))  # an item a sample would be of one kind
    if not batched and not mixed and _per_row([(len(each),) for each in values], shares):
        return type(first)(item for each in values for item in each)
    if all(len(each) == len(first) for each in values):
        return type(first)(_combine(list(items), shares, "") for items in zip(*values, strict=True))
    return values


def _has_rows(tensor: Tensor, rows: int) -> bool:
    return tensor.dim() > 0 and tensor.shape[0] == rows


def _rebuilt(first: Any, items: dict[str, Any]) -> Any:
    """A mapping of the user's own type, such as a model's output."""
    try:
        return type(first)(**items)
    except TypeError:
        return items


def _per_row(shapes: list[Any], shares: _Shares) -> bool:
    return all(len(shape) == 1 and shape[0] == count for shape, count in zip(shapes, shares.rows, strict=True))


def _combine_tensors(tensors: list[Tensor], shares: _Shares, key: str) -> Any:
    first = tensors[0]
    if _per_row([tensor.shape[:1] for tensor in tensors], shares):
        return torch.cat(tensors)
    if key == "num_tokens":
        return torch.stack(tensors).sum(0)
    if any(tensor.shape != first.shape for tensor in tensors):
        return tensors
    if not first.is_floating_point():
        same = all(torch.equal(tensor, first) for tensor in tensors)
        return first if same else torch.stack(tensors) if first.dim() == 0 else tensors
    weights = torch.tensor(shares.weights, dtype=torch.float64)
    weights = (weights / weights.sum()).to(dtype=first.dtype, device=first.device)
    return torch.tensordot(weights, torch.stack(tensors), dims=1)
