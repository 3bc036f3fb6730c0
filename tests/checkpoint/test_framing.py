"""Tensors framed as `torch.save` frames them."""

from __future__ import annotations

import io

import pytest
import torch
from torch.serialization import get_crc32_options, set_crc32_options

from hybrid_strategy.checkpoint.framing import BlockWriter

DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool, torch.complex64]


@pytest.fixture(autouse=True)
def _without_checksums():
    before = get_crc32_options()
    set_crc32_options(False)
    yield
    set_crc32_options(before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (64, 33), (0, 4)])
def test_every_byte_is_that_of_torch(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    blocks = [torch.rand(shape).mul(9).to(dtype) for _ in range(3)]
    ours, theirs = io.BytesIO(), io.BytesIO()
    writer = BlockWriter(ours)
    for block in blocks:
        writer.write(block)
        torch.save(block, part := io.BytesIO())
        theirs.write(part.getvalue())
    assert ours.getvalue() == theirs.getvalue()


@pytest.mark.parametrize("block", [torch.rand(3, 3, dtype=torch.complex64).conj(), torch.rand(3, 3).t(), torch.rand(4, 3)[1:]])
def test_what_is_more_than_values_is_left_to_torch(block: torch.Tensor) -> None:
    writer = BlockWriter(file := io.BytesIO())
    writer.write(torch.zeros(3, 3, dtype=block.dtype))
    start = file.tell()
    writer.write(block)
    assert torch.equal(torch.load(io.BytesIO(file.getvalue()[start:]), weights_only=True), block)
