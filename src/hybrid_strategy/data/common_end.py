"""Data of which each data-parallel rank brings its own share may end at different times: all ranks stop where the first one ends.

Otherwise a rank that still has a batch would wait in a step for one that has gone on to the end of the epoch.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist

_log = logging.getLogger(__name__)


def all_have_more(more: bool) -> bool:
    """Has every rank of the world another batch? A collective call, where there are several ranks."""
    return _least(int(more)) > 0


def common_length(data: object) -> int | None:
    """The least `len(data)` of all ranks; `None` where one has none. A collective call."""
    try:
        length = len(data)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        length = -1
    least = _least(length)
    return None if least < 0 else least


def _least(number: int) -> int:
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return number
    device = torch.device("cuda") if dist.get_backend() == "nccl" else torch.device("cpu")
    least = torch.tensor([number], device=device)
    dist.all_reduce(least, op=dist.ReduceOp.MIN)
    return int(least.item())


class CommonEnd:
    """An iterable of batches that ends on all ranks when it ends on one. Other attributes are those of the user's object.

    Args:
        data: yields this rank's batches.
    """

    def __init__(self, data: Iterable[Any]) -> None:
        self._data = data

    def __iter__(self) -> Iterator[Any]:
        inner = iter(self._data)
        for index in itertools.count():
            try:
                batch, more = next(inner), True
            except StopIteration:
                batch, more = None, False
            if not all_have_more(more):
                say_left_over(index, more)
                return
            yield batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._data, name)


class SizedCommonEnd(CommonEnd):
    """The same for data that has a length: that of the rank that has least."""

    def __init__(self, data: Iterable[Any], length: int) -> None:
        super().__init__(data)
        self._length = length

    def __len__(self) -> int:
        return self._length


def with_common_end(data: Iterable[Any]) -> CommonEnd:
    """`data`, ending on all ranks at once; a collective call."""
    length = common_length(data)
    return CommonEnd(data) if length is None else SizedCommonEnd(data, length)


def say_left_over(batches: int, more: bool) -> None:
    """Says that this rank had another batch when all stopped."""
    if more:
        _log.warning("the epoch ends after %d batches: another rank has no more, this one leaves out what it has", batches)
