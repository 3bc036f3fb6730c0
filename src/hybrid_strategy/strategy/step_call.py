"""What one call of a user's step by Lightning is made of."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from hybrid_strategy.parallel.shell import Shell, whole_of
from hybrid_strategy.parallel.trees import Cut, tensors_of
from hybrid_strategy.strategy.outputs import StepLoss, combine_outputs


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
    """The state of one play: what its passes share. `outputs[j]` and `losses[j]` are those of micro-batch `j`.

    `micro_batch` is the one whose forward pass runs now.
    """

    call: StepCall
    cut: Cut
    run_rows: float
    loss_scale: float
    losses: dict[int, StepLoss] = field(default_factory=dict)
    outputs: dict[int, Any] = field(default_factory=dict)
    micro_batch: int = 0

    def joined(self) -> Any:
        """What the step returned for the batch; `None` where it ran on other pipeline ranks."""
        rows = self.cut.rows
        order = [each for each in sorted(self.outputs) if rows[each] > 0] or sorted(self.outputs)[:1]
        return combine_outputs([self.outputs[each] for each in order], [rows[each] for each in order]) if order else None


@dataclass(frozen=True)
class PlayedAgain:
    """A step's forward passes, played once more.

    Attributes:
        micro_batches: the parts of this rank's batch.
        rows: the rows of each, as numbers of rows of the batch.
        outputs: what the step returned for them; only on the last stage.
    """

    micro_batches: list[Any] = field(default_factory=list)
    rows: list[tuple[int, ...]] = field(default_factory=list)
    outputs: dict[int, Any] = field(default_factory=dict)


def finished(_: Any, tensor: Tensor) -> Tensor:
    """A returned tensor as one device has it."""
    return (whole_of(tensor) if isinstance(tensor, Shell) else tensor).detach()


def signature_of(micro_batch: Any) -> tuple[Hashable, ...]:
    """Tells the shapes of a micro-batch from those of others; empty where it shows no tensors."""
    return tuple((path, tuple(tensor.shape), tensor.dtype) for path, tensor in tensors_of(micro_batch))
