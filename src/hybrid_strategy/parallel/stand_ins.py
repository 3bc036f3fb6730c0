"""What stands for values of earlier stages, told from real ones: a step may compute with it, but not make its results of it.

A model's `forward` runs on every stage and computes what it likes of the outputs of units that are not there, as long as it comes
to nothing. A unit that is given such a value finds it; here it is found in what the step itself returns and logs.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hybrid_strategy.parallel.trees import has_nan, iterate_tensors, map_tensors


class StandIn(Tensor):
    """What is computed of it is one, too."""


def marked(value: Any) -> Any:
    """The nested value with stand-ins for its plain tensors."""
    return map_tensors(lambda _, tensor: tensor.as_subclass(StandIn) if type(tensor) is Tensor else tensor, value)


def is_made_of_stand_ins(value: Any) -> bool:
    """Has a tensor of the nested value the NaN of a stand-in? What only took its shape has not."""
    return any(isinstance(each, StandIn) and has_nan(each) for each in iterate_tensors(value))
