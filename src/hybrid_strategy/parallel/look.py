"""What is noted of a step that is looked at closely."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from hybrid_strategy.errors import ConfigError, ModelError, message
from hybrid_strategy.parallel.side_values import Place
from hybrid_strategy.parallel.stand_ins import how_it_fails, origins_of_error

Need = tuple[str, str, str]
"""Key and value of a refusal, and how the value comes to it."""


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
        needs: what has been given values of units that have not come along: `(key, value, how)`, and the names of these units.
        failed: has a stage of this rank failed, so that what it sends from then on is nothing?
        unset: names of buffers that held NaN before.
        stood_in: has a unit of another stage been given the output of the one before the cut, in the place of its own?
    """

    inputs: list[Tensor] = field(default_factory=list)
    refused: list[ConfigError] = field(default_factory=list)
    output: Any = None
    kept: set[Place] = field(default_factory=set)
    taken: set[Place] = field(default_factory=set)
    asked: set[str] = field(default_factory=set)
    metrics_before: set[str] = field(default_factory=set)
    metrics: set[str] = field(default_factory=set)
    needs: dict[Need, list[str]] = field(default_factory=dict)
    failed: bool = False
    unset: set[str] = field(default_factory=set)
    stood_in: bool = False

    def need(self, key: str, value: str, how: str, makers: list[str]) -> None:
        """Notes that something takes values which `makers` have made on other stages."""
        self.needs.setdefault((key, value, how), makers)

    def note_failure(self, error: Exception, units: Sequence[str]) -> bool:
        """Notes what a stage has failed with, if all ranks shall be told: what is refused, and what comes of missing values."""
        if origins := origins_of_error(error):
            self.need("module", "the pipeline's model", how_it_fails(error), [units[each] for each in sorted(origins)])
        elif isinstance(error, ConfigError):
            if not self.needs:  # else it comes of the values that are missing
                self.refused.append(error)
        elif isinstance(error, RuntimeError) and "in-place operation" in str(error):
            self.refused.append(_changed_in_place(error))
        elif not self.needs and not self.refused:
            return False
        self.failed = True
        return True


def _changed_in_place(error: RuntimeError) -> ModelError:
    """A step has changed in place what has come over a cut, of which torch then makes no gradient."""
    rule = "its forward changes in place, between units, what a unit of another pipeline stage has made"
    advice = "Write x = x + y instead of x += y there, or do it inside of a unit"
    return ModelError(message("module", "the pipeline's model", rule, f"{type(error).__name__}: {error}".rstrip("."), advice))


def needs_refused(needs: Sequence[dict[Need, list[str]]], units: Sequence[str], carried: Iterable[int]) -> ModelError | None:
    """The refusal of what ranks have noted, with the whole of what must be carried."""
    first = next(((need, makers) for each in needs for need, makers in each.items()), None)
    if first is None:
        return None
    named = {units[each] for each in carried} | {name for each in needs for makers in each.values() for name in makers}
    return past_the_cut(*first[0], first[1], [each for each in units if each in named])


def past_the_cut(key: str, value: str, how: str, makers: Sequence[str], carried: Sequence[str] = ()) -> ModelError:
    """A value goes past a cut, and nobody sends it.

    Args:
        makers: units that have made it, where they are known.
        carried: what the plan must carry.
    """
    rule = f"{how} a value that an earlier unit has made, and only the output of the unit before it crosses a cut"
    numbers = f"{' and '.join(makers)} made it, on another stage" if makers else ""
    shown = f"Set carried=({', '.join(map(repr, carried))},) in parallel_plan() to have it sent, or let" if carried else "Let"
    advice = f"{shown} the units in between hand it on, e.g. return (memory, x), or cut elsewhere with stage_cuts"
    return ModelError(message(key, value, rule, numbers, advice))
