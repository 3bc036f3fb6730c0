"""Tensors as `torch.save` writes them, without asking it for every one: only the values differ between two of one kind."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import numpy
import torch
from torch import Tensor

_Kind = tuple[torch.dtype, torch.Size]


class _Frame(NamedTuple):
    """What lies before and behind the values."""

    head: bytes
    tail: bytes


class BlockWriter:
    """Writes tensors into a file, each as `torch.save` would: byte for byte, as long as it takes no checksum of the values.

    `torch.save` takes 0.2 ms for each, all of it with Python's lock held.

    Args:
        file: has `write`.
    """

    def __init__(self, file: Any) -> None:
        self._file = file
        self._frames: dict[_Kind, _Frame | None] = {}

    def write(self, block: Tensor) -> None:
        """Writes a tensor of the host."""
        frame = self._frame(block)
        if frame is None:
            torch.save(block, self._file)
            return
        self._file.write(frame.head)
        self._file.write(_bytes_of(block))
        self._file.write(frame.tail)

    def _frame(self, block: Tensor) -> _Frame | None:
        """None for what is more than values: strides, a shared storage, a sub-class, a conjugate that is still to be taken."""
        alone = block.is_contiguous() and block.numel() > 0 and block.untyped_storage().nbytes() == block.nbytes
        if type(block) is not Tensor or not alone or block.is_conj() or block.is_neg():
            return None
        kind = block.dtype, block.shape
        if kind not in self._frames:
            self._frames[kind] = _frame_of(block)
        return self._frames[kind]


class _Recorder:
    """A file that keeps what is written before and behind the memory at an address."""

    def __init__(self, address: int) -> None:
        self.parts = [bytearray()]
        self._address = address

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        if view.nbytes and numpy.frombuffer(view, numpy.uint8).ctypes.data == self._address:
            self.parts.append(bytearray())
        else:
            self.parts[-1] += view
        return view.nbytes

    def flush(self) -> None:
        """There is nothing to flush."""


def _frame_of(block: Tensor) -> _Frame | None:
    """None if the values were not written in one piece."""
    recorder = _Recorder(block.data_ptr())
    torch.save(block, cast(Any, recorder))
    return _Frame(*map(bytes, recorder.parts)) if len(recorder.parts) == 2 else None


def _bytes_of(block: Tensor) -> Any:
    return block.reshape(-1).view(torch.uint8).numpy()
