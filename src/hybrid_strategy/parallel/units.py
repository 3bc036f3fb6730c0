"""The units of a model by the patterns of its plan."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from hybrid_strategy.errors import ModelError, did_you_mean, message
from hybrid_strategy.spec.parallel_plan import matches


def find_units(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """Module names that the patterns stand for, in order; every pattern must match something.

    Raises:
        ModelError: a pattern matches no module.
    """
    names = [name for name, _ in model.named_modules() if name]
    found: list[str] = []
    for pattern in patterns:
        hits = [name for name in names if matches(pattern, name)]
        if not hits:
            raise ModelError(
                message(
                    "parallel_plan.units",
                    pattern,
                    "every unit must be a module of the model",
                    f"no module of {type(model).__name__} has this name",
                    f"Name modules such as {', '.join(names[:6])}",
                )
            )
        found.extend(hits)
    return found


def find_carried(model: nn.Module, units: Sequence[str], patterns: Sequence[str]) -> list[int]:
    """Numbers of the units whose outputs are carried past cuts.

    Raises:
        ModelError: a pattern matches no unit.
    """
    for pattern in patterns:
        if not any(matches(pattern, unit) for unit in units):
            rule = "what a pipeline carries past its cuts are outputs of units"
            numbers = f"No unit of {type(model).__name__} has this name"
            raise ModelError(message("parallel_plan.carried", pattern, rule, numbers, did_you_mean(pattern, units)))
    return [index for index, unit in enumerate(units) if any(matches(pattern, unit) for pattern in patterns)]
