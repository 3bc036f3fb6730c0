"""Cutting batches: only what has the batch's size along its declared dimension is cut, and every container keeps its type."""

from __future__ import annotations

from collections import UserDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from hybrid_strategy.errors import LayoutError
from hybrid_strategy.parallel.trees import count_rows, cut_batch, map_tensors, tensors_of

Pair = namedtuple("Pair", ("left", "right"))


@dataclass
class Sample:
    tokens: torch.Tensor
    note: str


@pytest.mark.parametrize("rows", range(1, 10))
@pytest.mark.parametrize("parts", [1, 2, 3, 4, 7])
def test_rows_are_kept_in_order_and_sizes_differ_by_at_most_one(rows: int, parts: int) -> None:
    batch = torch.arange(rows)
    cut = cut_batch(batch, parts, {})
    assert torch.equal(torch.cat(cut.micro_batches), batch)
    assert cut.rows == [len(each) for each in cut.micro_batches]
    assert len(cut.rows) == min(rows, parts)
    assert max(cut.rows) - min(cut.rows) <= 1


@pytest.mark.parametrize(
    "batch",
    [
        {"a": torch.zeros(4, 2), "b": [torch.zeros(4), "text"]},
        [torch.zeros(4), (torch.zeros(4, 3),)],
        Pair(torch.zeros(4), torch.zeros(4)),
        Sample(torch.zeros(4), "kept"),
        UserDict({"a": torch.zeros(4)}),
    ],
)
def test_containers_keep_their_type(batch: Any) -> None:
    cut = cut_batch(batch, 2, {})
    assert all(type(each) is type(batch) for each in cut.micro_batches)
    assert [len(tensor) for _, tensor in tensors_of(cut.micro_batches[0])] == [2] * len(tensors_of(batch))


def test_other_sizes_and_declared_dimensions() -> None:
    batch = {"ids": torch.zeros(4, 6), "mask": torch.zeros(6, 6), "position": torch.zeros(6, 4), "whole": torch.zeros(4)}
    cut = cut_batch(batch, 2, {"position": 1, "whole": None})
    first = cut.micro_batches[0]
    assert first["ids"].shape == (2, 6)
    assert first["mask"].shape == (6, 6)
    assert first["position"].shape == (6, 2)
    assert first["whole"].shape == (4,)


def test_a_batch_as_long_as_its_sequence_needs_a_declaration() -> None:
    batch = {"ids": torch.zeros(6, 6), "mask": torch.zeros(6, 6)}
    assert cut_batch(batch, 3, {"mask": None}).micro_batches[0]["mask"].shape == (6, 6)


def test_no_tensor_is_one_row_and_an_empty_batch_is_refused() -> None:
    assert count_rows({"text": "a"}, {}) == 1
    with pytest.raises(LayoutError, match="at least one sample"):
        cut_batch(torch.zeros(0, 3), 2, {})


def test_paths_name_every_tensor() -> None:
    value = {"a": [torch.zeros(1), {"b": torch.zeros(1)}]}
    assert [".".join(path) for path, _ in tensors_of(value)] == ["a.0", "a.1.b"]
    assert map_tensors(lambda path, _: path[-1], value) == {"a": ["0", {"b": "b"}]}
