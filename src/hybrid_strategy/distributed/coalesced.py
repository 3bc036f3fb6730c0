"""Collectives over many tensors at once, in a few large messages."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

BUCKET_BYTES = 32 * 2**20
"""Largest message made of several tensors; a larger tensor travels alone and without a copy."""


def buckets(tensors: Sequence[Tensor], bucket_bytes: int = BUCKET_BYTES) -> Iterator[list[int]]:
    """Indices of tensors of one type, in order, in lists of at most `bucket_bytes` (a larger tensor is a list of its own)."""
    current: list[int] = []
    size = 0
    for index, tensor in enumerate(tensors):
        num_bytes = tensor.numel() * tensor.element_size()
        if current and (size + num_bytes > bucket_bytes or tensor.dtype != tensors[current[0]].dtype):
            yield current
            current, size = [], 0
        current.append(index)
        size += num_bytes
    if current:
        yield current


def all_reduce_coalesced(tensors: Sequence[Tensor], group: dist.ProcessGroup | None, dtype: torch.dtype | None = None) -> None:
    """Sums every tensor in place over `group`; the same tensors, in the same order, on every rank.

    They travel and are summed as `dtype`, where it is given.

    The messages overlap: a bucket is filled while the one before it travels, and no more than two are in memory.
    """
    if group is None or not tensors:
        return
    travelling: deque[_Bucket] = deque()
    for indices in buckets(tensors):
        if len(travelling) > 1:
            travelling.popleft().arrive()
        travelling.append(_Bucket([tensors[index] for index in indices], group, dtype))
    while travelling:
        travelling.popleft().arrive()


class _Bucket:
    """Tensors on their way, as one message."""

    def __init__(self, tensors: list[Tensor], group: dist.ProcessGroup, dtype: torch.dtype | None) -> None:
        as_is = dtype is None or dtype == tensors[0].dtype
        self._alone = as_is and len(tensors) == 1 and tensors[0].is_contiguous()
        self._tensors = tensors
        flat = tensors[0] if self._alone else torch.cat([tensor.reshape(-1) for tensor in tensors])
        self._flat = flat if as_is else flat.to(dtype)
        self._work = dist.all_reduce(self._flat, group=group, async_op=True)

    def arrive(self) -> None:
        if self._work is not None:
            self._work.wait()
        if not self._alone:
            pieces = torch.split(self._flat, [tensor.numel() for tensor in self._tensors])
            shaped = [piece.view_as(tensor) for piece, tensor in zip(pieces, self._tensors, strict=True)]
            torch._foreach_copy_(self._tensors, shaped)
