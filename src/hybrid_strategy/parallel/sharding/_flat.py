"""Rows of many parameters laid out so that one reduce-scatter or all-gather serves them all.

A buffer of `parts` equal blocks; block `i` holds part `i`'s rows of every parameter, one after another, each padded to the size
of the largest part. So block `i` is exactly what rank `i` of the shard group gives or gets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from hybrid_strategy.spec.shard import even_chunk


@dataclass(frozen=True)
class FlatLayout:
    """Layout for parameters of the given shapes over `parts` ranks; shapes have at least one dimension."""

    shapes: tuple[tuple[int, ...], ...]
    parts: int

    def widths(self) -> list[int]:
        """Elements of each parameter in a block: its largest part, so that all blocks are equally long."""
        return [even_chunk(shape[0], self.parts, 0)[1] * _row(shape) for shape in self.shapes]

    def pack(self, tensors: Sequence[Tensor], dtype: torch.dtype | None = None) -> Tensor:
        """Whole tensors -> the buffer `[parts, block]` of type `dtype`, else of theirs; padding is zero."""
        widths = self.widths()
        like = tensors[0]
        buffer = torch.empty(self.parts, sum(widths), dtype=dtype or like.dtype, device=like.device)
        begin = 0
        for shape, width, tensor in zip(self.shapes, widths, tensors, strict=True):
            _copy_in(buffer.narrow(1, begin, width), tensor.reshape(-1), shape)
            begin += width
        return buffer

    def unpack(self, buffer: Tensor, tensors: Sequence[Tensor]) -> None:
        """The buffer `[parts, block]` -> whole tensors, in place."""
        begin = 0
        for shape, width, tensor in zip(self.shapes, self.widths(), tensors, strict=True):
            _copy_out(buffer.narrow(1, begin, width), tensor.view(-1), shape)
            begin += width

    def pack_shards(self, shards: Sequence[Tensor]) -> Tensor:
        """This rank's rows -> one block."""
        widths = self.widths()
        block = torch.zeros(sum(widths), dtype=shards[0].dtype, device=shards[0].device)
        for piece, shard in zip(torch.split(block, widths), shards, strict=True):
            piece[: shard.numel()].copy_(shard.reshape(-1))
        return block

    def shards(self, block: Tensor, index: int) -> list[Tensor]:
        """One block -> views of rank `index`'s rows, in their shapes."""
        views = []
        for shape, piece in zip(self.shapes, torch.split(block, self.widths()), strict=True):
            _, rows = even_chunk(shape[0], self.parts, index)
            views.append(piece[: rows * _row(shape)].view(rows, *shape[1:]))
        return views


def _row(shape: tuple[int, ...]) -> int:
    elements = 1
    for size in shape[1:]:
        elements *= size
    return elements


def _copy_in(columns: Tensor, flat: Tensor, shape: tuple[int, ...]) -> None:
    if flat.numel() == columns.numel():
        columns.copy_(flat.view(columns.shape))
        return
    for index in range(columns.shape[0]):
        start, rows = even_chunk(shape[0], columns.shape[0], index)
        length = rows * _row(shape)
        columns[index, :length].copy_(flat.narrow(0, start * _row(shape), length))
        columns[index, length:].zero_()


def _copy_out(columns: Tensor, flat: Tensor, shape: tuple[int, ...]) -> None:
    if flat.numel() == columns.numel():
        flat.view(columns.shape).copy_(columns)
        return
    for index in range(columns.shape[0]):
        start, rows = even_chunk(shape[0], columns.shape[0], index)
        length = rows * _row(shape)
        flat.narrow(0, start * _row(shape), length).copy_(columns[index, :length])


def reduce_scatter_started(buffer: Tensor, group: dist.ProcessGroup | None) -> tuple[Tensor, dist.Work | None]:
    """Starts to sum `[parts, block]` over the group; this rank's block, and what to wait for before it is read."""
    if group is None:
        return buffer[0], None
    block = torch.empty(buffer.shape[1], dtype=buffer.dtype, device=buffer.device)
    return block, dist.reduce_scatter_single(block, buffer.view(-1), group=group, async_op=True)


def reduce_scatter(buffer: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Sums `[parts, block]` over the group; returns this rank's block."""
    block, work = reduce_scatter_started(buffer, group)
    if work is not None:
        work.wait()
    return block


def all_gather(block: Tensor, parts: int, group: dist.ProcessGroup) -> Tensor:
    """Gathers the blocks of all ranks into `[parts, block]`."""
    buffer = torch.empty(parts, block.numel(), dtype=block.dtype, device=block.device)
    dist.all_gather_single(buffer.view(-1), block, group=group)
    return buffer
