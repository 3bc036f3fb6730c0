"""What the gates of a model share: the stage being played, what is noted of a step that is looked at, and how stages leave."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from hybrid_strategy.errors import ModelError
from hybrid_strategy.parallel.activation_checkpoint import without_reentry
from hybrid_strategy.parallel.compiled import uncompiled
from hybrid_strategy.parallel.inner_values import InnerValues
from hybrid_strategy.parallel.look import Look, past_the_cut
from hybrid_strategy.parallel.outside import OutsideCalls
from hybrid_strategy.parallel.past_layers import LayerWatch
from hybrid_strategy.parallel.shell import Shell
from hybrid_strategy.parallel.stage_now import Crossing, StageNow, StageOutput, left_out
from hybrid_strategy.parallel.stand_ins import origins_used
from hybrid_strategy.parallel.step_random import StepRandom
from hybrid_strategy.parallel.trees import has_nan, iterate_tensors, map_tensors


def _as_it_is(value: Any) -> Any:
    return value


class StageContext:
    """Shared by all gates of a model; `now` is `None` while no stage is being played, and then the gates are open.

    Args:
        random: the random states of steps.
    """

    def __init__(self, random: StepRandom | None = None) -> None:
        self.look: Look | None = None
        self.layers = LayerWatch(self.refuse)
        self.outside = OutsideCalls()
        self.inner: InnerValues | None = None
        self.compiles = False
        """Are layers compiled? Else what a model's own code compiles runs as it is written where it may be given stand-ins."""
        self.random = random or StepRandom(torch.device("cpu"), shared=False)
        self.now: StageNow | None = None
        self.units: Sequence[str] = ()
        self.carried: Collection[int] = ()
        """Units whose outputs go past all later cuts."""
        self.leaving: Callable[[Any], Any] = _as_it_is
        """Makes plain tensors of a stage's output."""
        self.arriving: Callable[[Any], Any] = _as_it_is
        """Makes of what was received what the unit before would have returned."""
        self.agree: Callable[[bool], bool] | None = None
        """Has any rank failed of those that gather weights together in every pass, and so must play the same stages?"""
        self._checked: set[str] = set()

    def refuse(self, error: ModelError) -> None:
        """Raises `error` now, or lets the step be played to its end with values that nobody will use."""
        if self.look is None:
            raise error
        self.look.refused.append(error)

    def note_step_inputs(self, index: int, given: Iterable[Tensor]) -> None:
        """A unit is reached, here or on another rank, with these tensors."""
        if index == 0 and self.look is not None and not self.look.inputs:
            self.look.inputs.extend(given)

    def check_inputs(self, unit: str, inputs: Any) -> None:
        """In a step that is looked at: notices values of earlier units that have not come along.

        Where nothing has kept track of the stand-ins, the first play of a unit still finds NaN.
        """
        known = self.look is None and unit in self._checked
        if known or self.now is None or self.now.received is None:
            return
        split = self.arriving is not _as_it_is
        origins = origins_used([each.local if isinstance(each, Shell) else each for each in iterate_tensors(inputs)])
        if split and not (origins and self.look is not None):
            return  # a part of a sequence cannot be looked at as a whole one
        if origins and self.look is not None:
            self.look.need("parallel_plan.units", unit, "it is given", [self.units[each] for each in sorted(origins)])
        elif self.look is not None and self.look.needs:  # it is known already where NaN comes from
            return
        elif unit not in self._checked and has_nan(inputs) and not has_nan(self.now.received):
            self.refuse(past_the_cut("parallel_plan.units", unit, "it is given", ()))
        self._checked.add(unit)

    def check_results(self, results: Mapping[str, Any]) -> None:
        """In a step that is looked at: notices results, by what they are called, that are made of values of earlier units."""
        for name, value in results.items():
            if self.look is not None and (origins := origins_used(value)):
                self.look.need("step", name, "it is made of", [self.units[each] for each in sorted(origins)])

    def note_use(self, how: str, origins: Iterable[int]) -> None:
        """A model's `forward` does with values of these units what nobody can follow."""
        if self.look is not None and self.now is not None:
            self.look.need("module", "the pipeline's model", how, [self.units[each] for each in sorted(origins)])

    def is_over(self, received: Crossing | None) -> bool:
        """Has this stage, an earlier one or another of this rank failed in the step at hand?"""
        if self.look is None:
            return False
        failed = self.look.failed or (received is not None and received.failed)
        self.look.failed = failed if self.agree is None else self.agree(failed)
        return self.look.failed

    def telling_all(self, run: Callable[[], Any], nothing: Any) -> Any:
        """Runs a stage; what fails in a step that is looked at is told to all ranks, once they have played it to its end.

        Raised where it occurs, it would leave the others waiting for what this stage was to send.
        """
        try:
            return run()
        except Exception as error:
            if not self.has_failed(error):
                raise
            return nothing

    def has_failed(self, error: Exception) -> bool:
        """Is `error` such a failure? It is noted then."""
        return self.look is not None and self.look.note_failure(error, self.units)

    def note_output(self, now: StageNow, index: int, output: Any) -> None:
        """A unit has returned, on a stage that is not the last; leaves the stage where the unit is its last one."""
        is_end, goes_on = index == now.stop - 1, index in self.carried
        closed = self.leaving(output) if is_end or goes_on else output
        if self.leaving is _as_it_is:
            now.shapes.note(index, output)
        try:
            if goes_on and not is_end:
                now.keep(index, map_tensors(lambda _, tensor: tensor.clone(), closed))
        except ModelError as error:
            self.refuse(error)
        if is_end:
            raise StageOutput(now.handed_on(closed, self.carried))

    def end_without_unit(self, now: StageNow, given: tuple[Any, Any]) -> None:
        """A unit of a later stage is called, and the last one of this stage was not: refused; leaves the stage.

        Args:
            given: what it is called with.
        """
        self.refuse(left_out(now.stop - 1))
        raise StageOutput(now.handed_on(self.leaving(next(iter(iterate_tensors(given)))), self.carried))

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around the passes of a step."""
        with self.outside.step(), self.random.step(), without_reentry(self.random.shared):
            yield

    @contextmanager
    def looking(self) -> Iterator[Look]:
        """Around the passes of a step that is looked at closely."""
        self.look = Look()
        try:
            with self._as_written(), contextlib.nullcontext() if self.inner is None else self.inner.watching():
                yield self.look
        finally:
            self.look = None

    def _as_written(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self.compiles else uncompiled()

    def forget_checks(self) -> None:
        """The next play of each unit is its first."""
        self._checked.clear()

    @contextmanager
    def play(self, now: StageNow) -> Iterator[None]:
        self.now = now
        try:
            yield
        finally:
            self.now = None
