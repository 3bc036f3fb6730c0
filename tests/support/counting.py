"""Counts what a rank sends: calls and payload bytes by collective, for comparison with arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from hybrid_strategy.parallel.tensor import collectives

PLACES: dict[Any, tuple[str, ...]] = {
    dist: ("all_reduce", "all_gather_single", "reduce_scatter_single", "broadcast", "isend"),
    collectives: ("all_reduce", "all_gather", "reduce_scatter"),  # tensor parallelism, through functional collectives
}
SMALL_BYTES = 2048
"""Messages up to this size carry logged values, shapes and flags, not activations, gradients or weights."""


@dataclass
class Counts:
    """Calls and bytes by collective; small messages apart."""

    calls: dict[str, int] = field(default_factory=dict)
    num_bytes: dict[str, int] = field(default_factory=dict)
    small: dict[str, int] = field(default_factory=dict)

    def add(self, name: str, tensor: torch.Tensor) -> None:
        size = tensor.numel() * tensor.element_size()
        if size <= SMALL_BYTES:
            self.small[name] = self.small.get(name, 0) + 1
            return
        self.calls[name] = self.calls.get(name, 0) + 1
        self.num_bytes[name] = self.num_bytes.get(name, 0) + size

    def clear(self) -> None:
        for each in (self.calls, self.num_bytes, self.small):
            each.clear()


@contextmanager
def counting() -> Iterator[Counts]:
    """Counts the calls made inside; the payload is the first tensor, for an all-gather or reduce-scatter the larger one."""
    counts = Counts()
    originals = [(place, name, getattr(place, name)) for place, names in PLACES.items() for name in names]

    def counted(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)]
            counts.add(name, max(tensors, key=lambda each: each.numel()))
            return original(*args, **kwargs)

        return call

    for place, name, original in originals:
        setattr(place, name, counted(name if place is dist else f"tensor_{name}", original))
    try:
        yield counts
    finally:
        for place, name, original in originals:
            setattr(place, name, original)
