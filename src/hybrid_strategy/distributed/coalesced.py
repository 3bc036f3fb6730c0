"""Collectives over many tensors at once, in a few large messages."""

from __future__ import annotations

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

    The messages overlap: a bucket is filled while the one before it travels.
    """
    if group is None or not tensors:
        return
    running: list[tuple[dist.Work | None, Tensor, list[Tensor]]] = []
    for indices in buckets(tensors):
        bucket = [tensors[index] for index in indices]
        as_is = dtype is None or dtype == bucket[0].dtype
        alone = as_is and len(bucket) == 1 and bucket[0].is_contiguous()
        flat = bucket[0] if alone else torch.cat([tensor.reshape(-1) for tensor in bucket])
        flat = flat if as_is else flat.to(dtype)
        running.append((dist.all_reduce(flat, group=group, async_op=True), flat, [] if alone else bucket))
    for work, flat, bucket in running:
        if work is not None:
            work.wait()
        if bucket:
            pieces = torch.split(flat, [tensor.numel() for tensor in bucket])
            torch._foreach_copy_(bucket, [piece.view_as(tensor) for piece, tensor in zip(pieces, bucket, strict=True)])
