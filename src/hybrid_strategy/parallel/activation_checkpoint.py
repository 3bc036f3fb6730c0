"""Recomputation of units in backward: none, selective (matrix products and attention are kept) or full."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

_KEPT_OPERATIONS = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops._c10d_functional.all_reduce.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
}
"""What `selective` keeps: the operations that cost the most to repeat for the memory they hold (arXiv:2205.05198, section 5)."""


def _policy(_context: Any, operation: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in _KEPT_OPERATIONS else CheckpointPolicy.PREFER_RECOMPUTE


def selective_contexts() -> Any:
    """The contexts of a region of which matrix products and attention are kept; for `torch.utils.checkpoint`."""
    return create_selective_checkpoint_contexts(_policy)


def checkpoint_units(units: Sequence[nn.Module], kind: str) -> None:
    """Makes `units` recompute their activations in backward; `kind` is `none`, `selective` or `full`."""
    if kind == "none":
        return
    contexts = selective_contexts if kind == "selective" else None
    for unit in units:
        unit.forward = _recomputed(unit.forward, contexts)


def _recomputed(forward: Callable[..., Any], contexts: Callable[..., Any] | None) -> Callable[..., Any]:
    options: dict[str, Any] = {"use_reentrant": False}
    if contexts is not None:
        options["context_fn"] = contexts

    @wraps(forward)
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, **options, **kwargs)

    return recomputed
