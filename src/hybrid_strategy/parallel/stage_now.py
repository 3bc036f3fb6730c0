"""The stage that a rank plays at the moment: which units are its own, what it has received for them, and what it hands on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hybrid_strategy.errors import ModelError, message
from hybrid_strategy.parallel.stand_ins import stand_in_for
from hybrid_strategy.parallel.structures import Leaf, Shapes, looks_of, structure_of
from hybrid_strategy.parallel.trees import iterate_tensors, map_tensors


class Crossing(NamedTuple):
    """What goes from one stage to the next.

    Attributes:
        output: of the unit before the cut.
        carried: outputs of units before it that later units are given, by the unit's number.
        shapes: what the outputs of all units before the cut look like.
        failed: the stage could not be played; all ranks are told of it after the step.
    """

    output: Any
    carried: dict[int, Any]
    shapes: Shapes
    failed: bool = False

    @staticmethod
    def nothing(failed: bool = False) -> Crossing:
        return Crossing(None, {}, Shapes(), failed)


class StageOutput(BaseException):
    """Carries a stage's output out of `forward` and out of the user's step, past any `except Exception` on the way."""

    def __init__(self, value: Any) -> None:
        super().__init__("the output of a pipeline stage")
        self.value = value


_Call = tuple[int, list[Tensor]]
"""A unit and the tensors that it was called with."""


@dataclass
class StageNow:
    """The stage being played: its units `start .. stop - 1`, and what it received (`None` for the first stage).

    Attributes:
        carried: outputs of units before `start - 1` that have come along, and of this stage's units what has to go on.
        shapes: what the outputs of units before `start`, and of this stage's units so far, look like.
    """

    start: int
    stop: int
    is_last: bool
    received: Any
    carried: dict[int, Any] = field(default_factory=dict)
    shapes: Shapes = field(default_factory=Shapes)
    _calls: list[_Call] = field(default_factory=list)
    _first: list[_Call] | None = None
    _memory: dict[Leaf, Tensor] = field(default_factory=dict)

    @staticmethod
    def of(start: int, stop: int, is_last: bool, crossing: Crossing | None) -> StageNow:
        """The stage with what has come over the cut before it."""
        came = crossing or Crossing.nothing()
        return StageNow(start, stop, is_last, came.output, dict(came.carried), Shapes(dict(came.shapes.of)))

    def is_here(self, index: int) -> bool:
        """Has the output of unit `index`, which is before `start`, come over the cut?"""
        return index == self.start - 1 or index in self.carried

    def skipped(self, index: int, given: Iterable[Tensor]) -> Any:
        """What unit `index`, which is before `start`, returns.

        Args:
            given: the tensors that it is called with.

        Raises:
            ModelError: what was received is asked for again, for other inputs: one output crosses each cut.
        """
        self._calls.append((index, list(given)))
        if index != self.start - 1:
            return self.carried[index] if index in self.carried else self._stand_in(index)
        calls, self._calls = self._calls, []
        if self._first is not None and not _alike(self._first, calls):
            raise _called_again(index)
        self._first = calls
        return self.received

    def keep(self, index: int, output: Any) -> None:
        """Carries what one of its own units has returned.

        Raises:
            ModelError: the unit has returned before, and one output goes on.
        """
        if index in self.carried:
            raise _called_again(index)
        self.carried[index] = output

    def handed_on(self, output: Any, carried: Iterable[int]) -> Crossing:
        """What leaves the stage where its last unit has returned `output`."""
        came = {self.start - 1: self.received, **self.carried}
        return Crossing(output, {index: came[index] for index in carried if index in came}, self.shapes)

    @property
    def waits(self) -> bool:
        """Has what was received not been asked for?"""
        return self.received is not None and self._first is None

    def _stand_in(self, index: int) -> Any:
        structure = self.shapes.of.get(index)
        device = next((each.device for each in iterate_tensors(self.received)), None)
        here = structure_of(self.received)
        if structure is None or looks_of(structure) == looks_of(here):  # whole numbers such as lengths are usual ones then
            return map_tensors(lambda _, tensor: self._unusable(tensor), self.received)
        return stand_in_for(structure, device, self._memory)

    def _unusable(self, tensor: Tensor) -> Any:
        if not (tensor.is_floating_point() or tensor.is_complex()):
            return tensor.detach().clone()
        return stand_in_for(structure_of(tensor), tensor.device, self._memory)


def _called_again(index: int) -> ModelError:
    rule = "it runs twice in one step with other inputs, and one output crosses each cut"
    advice = "Join the inputs into one call (torch.cat along the batch), or set pipeline_parallel_size=1"
    return ModelError(message("module", "the pipeline's model", rule, f"unit {index} was called again", advice))


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
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    with torch._C.DisableTorchFunctionSubclass():  # a stand-in would take it for the model's own question
        return bool(((first == second) | ((first != first) & (second != second))).all())


def left_out(index: int) -> ModelError:
    """A step has left out a unit after which a cut is."""
    rule = "the pipeline is cut after a unit that this step has left out (layer drop, an early exit)"
    advice = "Let that unit return its input, drop layers inside of units, or set pipeline_parallel_size=1"
    return ModelError(message("module", "the pipeline's model", rule, f"It is unit {index}", advice))
