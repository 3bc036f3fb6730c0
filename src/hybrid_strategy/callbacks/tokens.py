"""How many tokens a batch holds, whatever its form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch


def count_tokens(batch: Any) -> int:
    """Elements of the token ids: the entry `input_ids`, else the first tensor of whole numbers; 0 where there is none."""
    if isinstance(batch, torch.Tensor):
        return 0 if batch.is_floating_point() or batch.is_complex() else batch.numel()
    if isinstance(batch, Mapping):
        if "input_ids" in batch:
            return count_tokens(batch["input_ids"])
        batch = list(batch.values())
    if isinstance(batch, Sequence) and not isinstance(batch, str):
        return next((count for count in map(count_tokens, batch) if count), 0)
    return 0
