"""What is noted of a step that is looked at closely."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from hybrid_strategy.errors import ModelError
from hybrid_strategy.parallel.side_values import Place


@dataclass
class Look:
    """What a rank notes in a step that is looked at closely, for all ranks to compare after it.

    Attributes:
        inputs: what the first unit is called with for the first micro-batch.
        refused: what the step may not do.
        output: of the last unit, until the loss is made.
        kept: where layers of earlier stages have kept values beside their output.
        taken: where the loss has taken such values of the last stage.
        asked: attributes that were asked of layers that are not here.
        metrics_before: names of metric objects that were logged before the end of a stage that is not the last.
        metrics: those that the last stage has logged.
        stood_in: has a unit of another stage been given the output of the one before the cut, in the place of its own?
    """

    inputs: list[Tensor] = field(default_factory=list)
    refused: list[ModelError] = field(default_factory=list)
    output: Any = None
    kept: set[Place] = field(default_factory=set)
    taken: set[Place] = field(default_factory=set)
    asked: set[str] = field(default_factory=set)
    metrics_before: set[str] = field(default_factory=set)
    metrics: set[str] = field(default_factory=set)
    stood_in: bool = False
