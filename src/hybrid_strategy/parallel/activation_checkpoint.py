"""Recomputation of units in backward: none, selective (matrix products and attention are kept) or full."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from hybrid_strategy.parallel.wrapping import Around, Wrapped

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
        unit.forward = Wrapped(unit.forward, _recomputing(contexts))


def _recomputing(contexts: Callable[..., Any] | None) -> Around:
    options: dict[str, Any] = {"use_reentrant": False}
    if contexts is not None:
        options["context_fn"] = contexts

    def recomputing(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, **options, **kwargs)

    return recomputing


class _WithoutReentry:
    """Stands where a model's own `checkpoint(..., use_reentrant=True)` looks for torch's function."""

    @staticmethod
    def apply(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state)


@contextmanager
def without_reentry(wanted: bool) -> Iterator[None]:
    """Meanwhile a model's own recomputation is done without entering autograd again: the same gradients.

    With it a unit is called without a graph, so what a stage hands on, and what it has received, would carry no gradient.
    """
    before = torch.utils.checkpoint.CheckpointFunction
    if wanted:
        torch.utils.checkpoint.CheckpointFunction = _WithoutReentry  # type: ignore[assignment, misc]
    try:
        yield
    finally:
        torch.utils.checkpoint.CheckpointFunction = before  # type: ignore[misc]
