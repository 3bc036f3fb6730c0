"""The stage that a rank plays at the moment: which units are its own, and what it has received for them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from hybrid_strategy.errors import ModelError, message
from hybrid_strategy.parallel.trees import map_tensors


class StageOutput(BaseException):
    """Carries a stage's output out of `forward` and out of the user's step, past any `except Exception` on the way."""

    def __init__(self, value: Any) -> None:
        super().__init__("the output of a pipeline stage")
        self.value = value


_Call = tuple[int, list[Tensor]]
"""A unit and the tensors that it was called with."""


@dataclass
class StageNow:
    """The stage being played: its units `start .. stop - 1`, and what it received (`None` for the first stage)."""

    start: int
    stop: int
    is_last: bool
    received: Any
    _calls: list[_Call] = field(default_factory=list)
    _first: list[_Call] | None = None

    def skipped(self, index: int, given: Iterable[Tensor]) -> Any:
        """What unit `index`, which is before `start`, returns.

        Args:
            given: the tensors that it is called with.

        Raises:
            ModelError: what was received is asked for again, for other inputs: one output crosses each cut.
        """
        self._calls.append((index, list(given)))
        if index != self.start - 1:
            return self._stand_in
        calls, self._calls = self._calls, []
        if self._first is not None and not _alike(self._first, calls):
            rule = "it runs twice in one step with other inputs, and one output crosses each cut"
            advice = "Join the inputs into one call (torch.cat along the batch), or set pipeline_parallel_size=1"
            raise ModelError(message("module", "the pipeline's model", rule, f"unit {index} was called again", advice))
        self._first = calls
        return self.received

    @property
    def waits(self) -> bool:
        """Has what was received not been asked for?"""
        return self.received is not None and self._first is None

    @cached_property
    def _stand_in(self) -> Any:
        def unusable(_path: Any, tensor: Tensor) -> Tensor:
            return (
                torch.full_like(tensor, torch.nan, requires_grad=False) if tensor.is_floating_point() else tensor.detach().clone()
            )

        return map_tensors(unusable, self.received)


def _alike(first: list[_Call], again: list[_Call]) -> bool:
    """The same units with the same inputs: a step may ask for the same output twice."""
    pairs = list(zip(first, again, strict=False))
    return len(first) == len(again) and all(
        one[0] == other[0] and len(one[1]) == len(other[1]) and all(map(_equal, one[1], other[1])) for one, other in pairs
    )


def _equal(first: Tensor, second: Tensor) -> bool:
    """Bit for bit, so that what stands in for values that are not here is like itself."""
    if first is second:
        return True
    alike = first.shape == second.shape and first.dtype == second.dtype
    return alike and bool(((first == second) | ((first != first) & (second != second))).all())


def left_out(index: int) -> ModelError:
    """A step has left out a unit after which a cut is."""
    rule = "the pipeline is cut after a unit that this step has left out (layer drop, an early exit)"
    advice = "Let that unit return its input, drop layers inside of units, or set pipeline_parallel_size=1"
    return ModelError(message("module", "the pipeline's model", rule, f"It is unit {index}", advice))
