"""What one call of a user's step by Lightning is made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from hybrid_strategy.parallel.trees import Cut
from hybrid_strategy.strategy.outputs import StepLoss


@dataclass
class StepCall:
    """One call of a user's step by Lightning.

    Attributes:
        kind: `train`, `validate`, `test` or `predict`.
        function: the user's step.
        context: makes the precision context of one forward pass.
        arguments: what Lightning passes after the batch.
        real_rows: samples of this rank's batch that count; 0 where the batch only keeps the rank busy. `None`: all.
        run_rows: samples of this step on all data-parallel ranks together. `None`: not known, the ranks add them up.
        sample_dims: batch dimension of the batch's tensors, as far as the loader has found it out.
    """

    kind: str
    function: Callable[..., Any]
    context: Callable[[], AbstractContextManager[Any]]
    batch: Any
    arguments: tuple[Any, ...]
    real_rows: int | None = None
    run_rows: int | None = None
    sample_dims: Mapping[str, int | None] = field(default_factory=dict)


@dataclass
class Play:
    """The state of one play: what its passes share. `outputs[j]` and `losses[j]` are those of micro-batch `j`."""

    call: StepCall
    cut: Cut
    run_rows: float
    loss_scale: float
    losses: dict[int, StepLoss] = field(default_factory=dict)
    outputs: dict[int, Any] = field(default_factory=dict)
