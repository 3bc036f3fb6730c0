"""Which samples were read: a digest of every row, so that data that was divided wrongly is told from numbers that are wrong."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hybrid_strategy.parallel.trees import count_rows, cut_batch, iterate_tensors
from hybrid_strategy.parity.records import RunRecord
from hybrid_strategy.spec.layout import Layout


def digests(batch: Any, batch_dims: Mapping[str, int | None]) -> list[str]:
    """A digest of each row of a batch, over all its tensors."""
    rows = cut_batch(batch, max(count_rows(batch, batch_dims), 1), batch_dims)
    return [_digest(row) for row in rows.micro_batches]


def _digest(row: Any) -> str:
    state = hashlib.blake2b(digest_size=6)
    for tensor in iterate_tensors(row):
        state.update(_bytes(tensor))
    return state.hexdigest()


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()


def misread(reference: RunRecord, layout: RunRecord, sizes: Layout, step: int) -> str:
    """What is wrong with the samples of a step, in words; empty where each was read where it should be."""
    want = Counter(reference.ranks[0].steps[step]["samples"])
    by_data: dict[int, list[str]] = {}
    for rank in layout.ranks:
        own = rank.steps[step]["samples"]
        first = by_data.setdefault(sizes.coordinate(rank.rank).data_parallel, own)
        if own != first:
            return f"samples: rank {rank.rank} reads other samples than its tensor and pipeline peers"
    got = Counter(digest for own in by_data.values() for digest in own)
    missing = (want - got).total()
    if not missing:
        return ""
    twice = sum(count - 1 for count in got.values() if count > 1)
    text = f"samples: {missing} of the {want.total()} rows that one process reads were read by no rank"
    return f"{text}, and {twice} by more than one" if twice else text
