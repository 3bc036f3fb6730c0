"""Counts the collectives that a block of code calls."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class CountCollectives(TorchDispatchMode):
    """`counts`: collective -> calls, `elements`: collective -> elements given to it, of a `with CountCollectives() as it` block.

    Unlike torch's CommDebugMode it hangs no backward hooks on modules: for these, split logits would have to be gathered.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.elements: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.partition(".")[0].strip("_")
        if func.namespace in ("c10d", "_c10d_functional") and name != "wait_tensor":
            self.counts[name] += 1
            given = args[0] if isinstance(args[0], torch.Tensor) else args[0][0]
            self.elements[name] += given.numel()
        return func(*args, **(kwargs or {}))
