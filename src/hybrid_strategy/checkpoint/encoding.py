"""State as plain data: everything that is not a sharded tensor is reduced to numbers, text, containers and tensors before it
is written, so that reading it never runs code (`torch.load(weights_only=True)`)."""

from __future__ import annotations

import io
from collections import deque
from collections.abc import Iterable, Mapping, Sequence, Set
from enum import Enum
from pathlib import PurePath
from typing import Any

import numpy
import torch
from torch import Tensor

_AS_IT_IS = (bool, bytes, complex, torch.dtype, torch.device, torch.Size)


class _UnsavedError(Exception):
    """A value that is not data."""


def plain(value: Any, where: str = "state") -> tuple[Any, list[str]]:
    """A copy of `value` made of plain data, and what of it could not be kept.

    Mappings become dicts, other sequences lists, sub-classes of int, float and str their base, numpy arrays tensors, paths
    text and enum members their value. Tensors are copied to the host. A value that is an object of any other class is left out
    of its mapping or set, and is None in a sequence.

    Returns:
        The copy (None if `value` itself cannot be kept) and lines `<where>.<key>: <class>`, one for each value left out.
    """
    unsaved: list[str] = []
    try:
        return _plain(value, where, unsaved), unsaved
    except _UnsavedError:
        return None, unsaved


def encode(value: Any) -> bytes:
    """Plain data as the bytes of a file that `decode` and `torch.load` read."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def decode(data: bytes) -> Any:
    """What `encode` wrote; tensors on the CPU. Refuses anything but data."""
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def same(first: Any, second: Any) -> bool:
    """Equality of plain data: tensors by value, dtype and shape; NaN equals NaN."""
    if isinstance(first, Tensor) or isinstance(second, Tensor):
        return isinstance(first, Tensor) and isinstance(second, Tensor) and _same_tensor(first, second)
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(same(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple) and isinstance(second, list | tuple):
        return len(first) == len(second) and all(map(same, first, second))
    if isinstance(first, float) and isinstance(second, float):
        return first == second or (first != first and second != second)
    return bool(first == second)


def _same_tensor(first: Tensor, second: Tensor) -> bool:
    if first.dtype != second.dtype or first.shape != second.shape:
        return False
    return torch.equal(first, second) or bool(torch.isclose(first, second, rtol=0, atol=0, equal_nan=True).all())


def _plain(value: Any, where: str, unsaved: list[str]) -> Any:
    if value is None or isinstance(value, _AS_IT_IS):
        return value
    if isinstance(value, Enum):
        return _plain(value.value, where, unsaved)
    for base in (int, float, str):
        if isinstance(value, base):
            return base(value)
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True).contiguous()
    if isinstance(value, numpy.generic | numpy.ndarray):
        return _plain_numpy(value, where, unsaved)
    return _plain_container(value, where, unsaved)


def _plain_numpy(value: Any, where: str, unsaved: list[str]) -> Any:
    if isinstance(value, numpy.generic):
        return _plain(value.item(), where, unsaved)
    try:
        return torch.from_numpy(numpy.array(value, copy=True))
    except TypeError:
        raise _refuse(value, where, unsaved) from None


def _plain_container(value: Any, where: str, unsaved: list[str]) -> Any:
    if isinstance(value, Mapping):
        pairs = ((_key(key, where, unsaved), key) for key in value)
        return dict(_kept(((new[0], value[old]) for new, old in pairs if new), where, unsaved))
    if isinstance(value, Set):
        return {each for _, each in _kept(((each, each) for each in value), where, unsaved)}
    if isinstance(value, Sequence | deque):
        kept = dict(_kept(enumerate(value), where, unsaved))
        items = [kept.get(position) for position in range(len(value))]
        return tuple(items) if isinstance(value, tuple) else items
    raise _refuse(value, where, unsaved)


def _key(key: Any, where: str, unsaved: list[str]) -> tuple[Any] | None:
    try:
        return (_plain(key, f"{where}.{key}", unsaved),)
    except _UnsavedError:
        return None


def _kept(pairs: Iterable[tuple[Any, Any]], where: str, unsaved: list[str]) -> list[tuple[Any, Any]]:
    kept = []
    for key, each in pairs:
        try:
            kept.append((key, _plain(each, f"{where}.{key}", unsaved)))
        except _UnsavedError:
            continue
    return kept


def _refuse(value: Any, where: str, unsaved: list[str]) -> _UnsavedError:
    unsaved.append(f"{where}: {type(value).__module__}.{type(value).__qualname__}")
    return _UnsavedError(where)
