"""Nested values (tensors in dicts, lists, tuples, dataclasses): walking them, and cutting a batch into micro-batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

from hybrid_strategy.errors import LayoutError, message

Path = tuple[str, ...]


def is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def map_tensors(
    function: Callable[[Path, Any], Any], value: Any, path: Path = (), is_leaf: Callable[[Any], bool] = is_tensor
) -> Any:
    """A copy of `value` with `function(path, tensor)` in place of every tensor (or leaf); containers keep their types."""
    if is_leaf(value):
        return function(path, value)
    if isinstance(value, Mapping):
        return _map_mapping(function, value, path, is_leaf)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        named = zip(value._fields, value, strict=True)
        return type(value)(*(map_tensors(function, each, (*path, name), is_leaf) for name, each in named))
    if isinstance(value, (list, tuple)):
        return type(value)(map_tensors(function, each, (*path, str(i)), is_leaf) for i, each in enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        given = [f.name for f in dataclasses.fields(value) if f.init]
        fields = {name: map_tensors(function, getattr(value, name), (*path, name), is_leaf) for name in given}
        return dataclasses.replace(value, **fields)
    return value


def _map_mapping(
    function: Callable[[Path, Any], Any], value: Mapping[str, Any], path: Path, is_leaf: Callable[[Any], bool]
) -> Any:
    items = {key: map_tensors(function, each, (*path, str(key)), is_leaf) for key, each in value.items()}
    if type(value) is dict:
        return items
    if isinstance(value, MutableMapping) and not dataclasses.is_dataclass(value):
        clone = value.copy() if hasattr(value, "copy") else type(value)(**value)
        for key, each in items.items():
            clone[key] = each
        return clone
    return type(value)(**items)


def tensors_of(value: Any) -> list[tuple[Path, Tensor]]:
    """All tensors of a nested value with their paths, in order."""
    return list(_walk(value, ()))


def _walk(value: Any, path: Path) -> Iterator[tuple[Path, Tensor]]:
    """Goes where `map_tensors` goes, and makes no object anew: a class of the user's need not allow it."""
    if isinstance(value, Tensor):
        yield path, value
        return
    inside: Iterable[tuple[str, Any]] = ()
    if isinstance(value, Mapping):
        inside = ((str(key), each) for key, each in value.items())
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        inside = zip(value._fields, value, strict=True)
    elif isinstance(value, (list, tuple)):
        inside = ((str(index), each) for index, each in enumerate(value))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        inside = ((field.name, getattr(value, field.name)) for field in dataclasses.fields(value) if field.init)
    for name, each in inside:
        yield from _walk(each, (*path, name))


@dataclasses.dataclass(frozen=True)
class Cut:
    """A batch cut into micro-batches; `rows[j]` samples are in micro-batch `j`."""

    micro_batches: list[Any]
    rows: list[int]

    @property
    def num_rows(self) -> int:
        return sum(self.rows)


def count_rows(batch: Any, batch_dims: Mapping[str, int | None]) -> int:
    """Samples of a batch: the size of the first tensor along its batch dimension; 1 where there is none."""
    for path, tensor in tensors_of(batch):
        dim = batch_dim(path, batch_dims)
        if dim is not None and tensor.dim() > dim:
            return tensor.shape[dim]
    return 1


def cut_batch(batch: Any, num_microbatches: int, batch_dims: Mapping[str, int | None], rows: int | None = None) -> Cut:
    """Cuts a batch along the batch dimension into at most `num_microbatches` parts whose sizes differ by at most one.

    Only tensors whose declared batch dimension has the batch's size are cut, and lists of as many strings or numbers (what a
    collate function leaves of fields that are no tensors); everything else passes whole. A batch of fewer rows than
    `num_microbatches` gives as many micro-batches as it has rows.

    Args:
        rows: samples of the batch, where they are known; default: counted.
    """
    rows = count_rows(batch, batch_dims) if rows is None else rows
    if rows == 0:
        raise LayoutError(message("batch", 0, "a batch must hold at least one sample", "", "Check the data loader"))
    parts = min(num_microbatches, rows)
    if parts == 1:
        return Cut([batch], [rows])
    bounds = [rows * j // parts for j in range(parts + 1)]
    pieces = [_slice_batch(batch, rows, bounds[j], bounds[j + 1], batch_dims) for j in range(parts)]
    return Cut(pieces, [bounds[j + 1] - bounds[j] for j in range(parts)])


def can_be_cut(batch: Any, rows: int, batch_dims: Mapping[str, int | None]) -> bool:
    """Has anything in a batch of `rows` samples an entry for each of them?"""
    found = False

    def look(path: Path, leaf: Any) -> Any:
        nonlocal found
        dim = batch_dim(path, batch_dims)
        size = len(leaf) if isinstance(leaf, list) else leaf.shape[dim] if dim is not None and leaf.dim() > dim else None
        found |= dim is not None and size == rows
        return leaf

    map_tensors(look, batch, is_leaf=_is_cut)
    return found


def _slice_batch(batch: Any, rows: int, start: int, stop: int, batch_dims: Mapping[str, int | None]) -> Any:
    def piece(path: Path, leaf: Any) -> Any:
        dim = batch_dim(path, batch_dims)
        if isinstance(leaf, list):
            return leaf[start:stop] if dim == 0 and len(leaf) == rows else leaf
        if dim is None or leaf.dim() <= dim or leaf.shape[dim] != rows:
            return leaf
        part = leaf.narrow(dim, start, stop - start)
        return part if leaf.requires_grad else part.data  # what a step writes into its rows concerns no other rows' graph

    return map_tensors(piece, batch, is_leaf=_is_cut)


def _is_cut(value: Any) -> bool:
    """Is `value` something that is cut as a whole: a tensor, or a list with an entry a row?"""
    return isinstance(value, Tensor) or _is_plain_list(value)


def sample_dims(batch: Any, alone: Any, samples: int) -> dict[str, int | None]:
    """Which dimension of each tensor of a batch of `samples` counts them, from what one sample alone makes.

    Returns:
        Dotted path -> dimension, `None` for what all samples share; what is not clear is left out.

    >>> sample_dims({"x": torch.ones(5, 3), "mask": torch.ones(3, 3)}, {"x": torch.ones(5, 1), "mask": torch.ones(3, 3)}, 3)
    {'x': 1, 'mask': None}
    """
    single = dict(tensors_of(alone))
    found: dict[str, int | None] = {}
    for path, tensor in tensors_of(batch):
        if path not in single or single[path].dim() != tensor.dim() or not tensor.dim():
            continue
        pairs = list(zip(tensor.shape, single[path].shape, strict=True))
        counting = [dim for dim, pair in enumerate(pairs) if pair == (samples, 1)]
        if counting:
            found[".".join(path)] = counting[0]
        elif pairs[0][0] == pairs[0][1]:
            found[".".join(path)] = None
    return found


def _is_plain_list(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, (str, bytes, int, float)) for each in value)


def batch_dim(path: Path, batch_dims: Mapping[str, int | None], default: int | None = 0) -> int | None:
    """The declared batch dimension of the tensor at `path`: by its dotted path, by its last key, else `default`."""
    for key in (".".join(path), path[-1] if path else ""):
        if key in batch_dims:
            return batch_dims[key]
    return default


def iterate_tensors(value: Any) -> Iterator[Tensor]:
    """The tensors of a nested value, in order."""
    return (tensor for _, tensor in tensors_of(value))


def has_nan(value: Any) -> bool:
    """Is there NaN in a tensor of a nested value?"""
    with torch._C.DisableTorchFunctionSubclass():  # a stand-in would take it for the model's own question
        return any(bool(each.isnan().any()) for _, each in tensors_of(value) if each.is_floating_point() or each.is_complex())


def detach_leaf(tensor: Tensor) -> Tensor:
    """A leaf with the tensor's values that collects a gradient where the tensor did."""
    return tensor.detach().requires_grad_(tensor.requires_grad and torch.is_grad_enabled())
