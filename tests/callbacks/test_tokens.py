"""Tokens are counted in whatever form a batch has."""

from __future__ import annotations

import pytest
import torch

from hybrid_strategy.callbacks.tokens import count_tokens

IDS = torch.zeros(4, 8, dtype=torch.int64)


@pytest.mark.parametrize(
    ("batch", "count"),
    [
        ({"input_ids": IDS, "labels": IDS}, 32),
        ({"labels": torch.zeros(4, 9), "tokens": IDS}, 32),
        ((IDS, IDS), 32),
        ([torch.zeros(4, 3), IDS], 32),
        (IDS, 32),
        (torch.zeros(4, 8), 0),
        ((torch.zeros(4, 8), torch.zeros(4)), 0),
        ("text", 0),
        (None, 0),
    ],
)
def test_count(batch, count):
    assert count_tokens(batch) == count
