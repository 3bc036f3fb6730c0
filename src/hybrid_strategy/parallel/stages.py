"""Pipeline stages of an unmodified model: the whole model with the units of other ranks taken out, no name changed.

Every rank runs the model's own `forward`. While it plays stage `s`, which holds the units `start .. stop - 1`:

- a unit before `start` is skipped. Unit `start - 1` returns what was received from the stage before, and so do those whose
  outputs the plan has carried past cuts (an encoder's memory, a skip connection). Other units return stand-ins of NaN; what
  `forward` does with them is thrown away, and where it is not the first play says which output must be carried;
- the output of unit `stop - 1` leaves `forward` at once, carried by `StageOutput`, unless the stage is the last one.

So one model object per rank serves all of its stages, and `self.model(...)` in the user's step is all that is needed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from hybrid_strategy.errors import ModelError, message
from hybrid_strategy.parallel.activation_checkpoint import without_reentry
from hybrid_strategy.parallel.ghosts import ghost_of, is_ghost, shown
from hybrid_strategy.parallel.inner_values import InnerValues
from hybrid_strategy.parallel.look import Look, past_the_cut
from hybrid_strategy.parallel.outside import OutsideCalls
from hybrid_strategy.parallel.past_layers import LayerWatch
from hybrid_strategy.parallel.stage_now import Crossing, StageNow, StageOutput, left_out
from hybrid_strategy.parallel.stand_ins import marked, origins_used
from hybrid_strategy.parallel.step_random import StepRandom
from hybrid_strategy.parallel.trees import has_nan, iterate_tensors, map_tensors
from hybrid_strategy.parallel.valueless import lose


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
        self.random = random or StepRandom(torch.device("cpu"), shared=False)
        self.now: StageNow | None = None
        self.units: Sequence[str] = ()
        self.carried: Collection[int] = ()
        """Units whose outputs go past all later cuts."""
        self.leaving: Callable[[Any], Any] = _as_it_is
        """Makes plain tensors of a stage's output."""
        self.arriving: Callable[[Any], Any] = _as_it_is
        """Makes of what was received what the unit before would have returned."""
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
        split = self.arriving is not _as_it_is  # a part of a sequence cannot be looked at as a whole one
        known = self.look is None and unit in self._checked
        if known or self.now is None or self.now.received is None or split:
            return
        origins = origins_used(inputs)
        if origins and self.look is not None:
            self.look.need("parallel_plan.units", unit, "it is given", [self.units[each] for each in sorted(origins)])
        elif unit not in self._checked and has_nan(inputs) and not has_nan(self.now.received):
            self.refuse(past_the_cut("parallel_plan.units", unit, "it is given", ()))
        self._checked.add(unit)

    def check_results(self, results: Mapping[str, Any]) -> None:
        """In a step that is looked at: notices results, by what they are called, that are made of values of earlier units."""
        for name, value in results.items():
            if self.look is not None and (origins := origins_used(value)):
                self.look.need("step", name, "it is made of", [self.units[each] for each in sorted(origins)])

    def is_over(self, received: Crossing | None) -> bool:
        """Has this stage, an earlier one or another of this rank failed in the step at hand?"""
        if self.look is None:
            return False
        self.look.failed |= received is not None and received.failed
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
            with contextlib.nullcontext() if self.inner is None else self.inner.watching():
                yield self.look
        finally:
            self.look = None

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


_PLAIN = (bool, int, float, str, torch.Size, torch.dtype, type, type(None))
"""Attributes that say what a layer is."""


class AbsentUnit(nn.Module):
    """Stands where a unit of another rank stood. Answers for the unit's plain attributes, holds no parameter."""

    def __init__(self, unit: nn.Module, index: int, context: StageContext, ghost: nn.Module) -> None:
        super().__init__()
        kept = {name: value for name, value in vars(unit).items() if not name.startswith("_") and name != "training"}
        object.__setattr__(self, "_kept", kept)
        object.__setattr__(self, "_context", context)
        object.__setattr__(self, "_unit_index", index)
        object.__setattr__(self, "ghost", ghost)
        object.__setattr__(self, "_kind", type(unit))

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """Within a step that of the unit: a model's `forward` may treat kinds of layers differently, or collect their outputs."""
        kind = vars(self).get("_kind", AbsentUnit)
        return AbsentUnit if kind is AbsentUnit or self.__dict__["_context"].now is None else kind

    @property
    def _parameters(self) -> dict[str, nn.Parameter | None]:
        """None, but within a step: there code that goes over all parameters must not leave these out unnoticed."""
        if self.__dict__["_context"].now is None:
            return self.__dict__["_own_parameters"]  # type: ignore[no-any-return]
        device = next((each.device for each in iterate_tensors(self._context.now.received)), None)
        return {name: _unusable(each, device, self._context) for name, each in self.ghost.named_parameters()}

    @_parameters.setter
    def _parameters(self, empty: dict[str, nn.Parameter | None]) -> None:
        self.__dict__["_own_parameters"] = empty

    def __getattr__(self, name: str) -> Any:
        kept = self.__dict__.get("_kept", {})
        look = self.__dict__["_context"].look if "_context" in self.__dict__ else None
        if look is not None:
            look.asked.add(name)
        if name in kept:
            return kept[name]
        with contextlib.suppress(AttributeError):
            return super().__getattr__(name)
        if "ghost" in self.__dict__ and self._context.now is not None:
            part, own = self.ghost._modules.get(name), self.ghost._parameters.get(name)
            if part is not None:
                return AbsentPart(part, self._unit_index, self._context, part)
            if own is not None:
                return self._parameters[name]
        rule = "this rank holds only its own stages, and a unit of another pipeline rank was asked for its layers or weights"
        advice = "Use them inside of that unit's forward, or set pipeline_parallel_size=1"
        raise AttributeError(
            message("module", "the pipeline's model", rule, f"{name!r} of unit {self.__dict__.get('_unit_index')}", advice)
        )

    def __iter__(self) -> Iterator[Any]:
        self._refuse_opening()
        return iter(())

    def __getitem__(self, _index: Any) -> Any:
        self._refuse_opening()
        return nn.Identity()

    def _refuse_opening(self) -> None:
        rule = "the model's forward goes through the parts of a unit instead of calling it, so it cannot be left to another rank"
        advice, kind = "Name its parts as units, such as 'stages.*.*'", self.__dict__["_kind"].__name__
        self._context.refuse(ModelError(message("parallel_plan.units", kind, rule, f"It is unit {self._unit_index}", advice)))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        now = self._context.now
        if now is not None and self._unit_index >= now.stop:
            self._context.end_without_unit(now, (args, kwargs))
        if now is None or now.received is None:
            raise ModelError(
                message(
                    "module",
                    "the pipeline's model",
                    "a unit of another pipeline rank was called outside of a step",
                    "this rank holds only its own stages",
                    "Call the model from training_step, validation_step, test_step or predict_step",
                )
            )
        return skip_unit(self._context, now, self._unit_index, (args, kwargs))


class AbsentPart(AbsentUnit):
    """A part of a unit of another rank, which a model's `forward` asks for its plain attributes (`layers[0].attention.heads`)."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        for name in [name for name, value in self._kept.items() if not isinstance(value, _PLAIN)]:
            del self._kept[name]  # what it counts or keeps is on the other rank

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        rule = "a part of a unit of another pipeline rank was called outside of that unit's forward"
        advice = "Name it as a unit of its own in parallel_plan(), or set pipeline_parallel_size=1"
        kind = type(self.ghost).__name__
        raise ModelError(message("module", kind, rule, f"It belongs to unit {self._unit_index}", advice))


def skip_unit(context: StageContext, now: StageNow, index: int, given: Any) -> Any:
    """Instead of a unit that belongs to an earlier stage."""
    tensors = list(iterate_tensors(given))
    context.note_step_inputs(index, tensors)
    context.random.skip_unit()
    try:
        output = now.skipped(index, tensors)
    except ModelError as error:
        context.refuse(error)
        output = now.received
    if index in context.carried:  # it goes on as it came, whatever is done with it here
        output = map_tensors(lambda _, tensor: tensor.clone(), output)
    is_real = now.is_here(index) or context.look is None
    if context.look is not None:
        context.look.stood_in |= not is_real
    return context.arriving(output if is_real else marked(output, index))


def _unusable(parameter: nn.Parameter, device: torch.device | None, context: StageContext) -> nn.Parameter:
    """What a step sees of a parameter of another rank; one that is tied to one of this rank is that one."""
    if not is_ghost(parameter):
        return parameter
    shown_as = nn.Parameter(parameter.detach().to(device), requires_grad=parameter.requires_grad)
    lose(shown_as, partial(_refuse_use, context))
    return shown_as


def _refuse_use(context: StageContext) -> None:
    rule = "a step used a parameter of another pipeline rank outside of the model's forward"
    advice = "Use weight_decay of the optimizer instead of a norm in the loss, or set pipeline_parallel_size=1"
    context.refuse(ModelError(message("module", "the pipeline's model", rule, "This rank holds only its own stages", advice)))


class _Gate:
    """Mixed into a unit's class: skips the unit, or ends the stage at its output."""

    _stage_context: StageContext
    _unit_index: int
    _unit_name: str

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        context, now = self._stage_context, self._stage_context.now
        if now is not None and self._unit_index < now.start:
            return skip_unit(context, now, self._unit_index, (args, kwargs))
        if now is not None and self._unit_index >= now.stop:
            context.end_without_unit(now, (args, kwargs))
        if now is not None:
            if now.waits:
                context.refuse(left_out(now.start - 1))
            context.note_step_inputs(self._unit_index, iterate_tensors((args, kwargs)))
            context.check_inputs(self._unit_name, (args, kwargs))
        with context.outside.call(), context.random.unit(), context.layers.inside(self._unit_index):
            output = super().__call__(*args, **kwargs)  # type: ignore[misc]
        if now is not None and not now.is_last:
            context.note_output(now, self._unit_index, output)
        if now is not None and self._unit_index == now.stop - 1 and context.look is not None:
            context.look.output = output
        return output


def cut_model(model: nn.Module, units: Sequence[str], kept: set[int], context: StageContext) -> set[str]:
    """Takes the units whose index is not in `kept` out of the model.

    Returns:
        The names of the units that were taken out.
    """
    indices = {name: index for index, name in enumerate(units) if index not in kept}
    absent = set(indices)
    present = [module for name, module in model.named_modules() if not _below(name, absent)]
    memo = {id(each): each for module in present for each in module._parameters.values() if each is not None}
    for name in absent:
        parent, _, child = name.rpartition(".")
        unit = model.get_submodule(name)
        model.get_submodule(parent)._modules[child] = AbsentUnit(unit, indices[name], context, ghost_of(unit, memo))
    return absent


def _below(name: str, units: Collection[str]) -> bool:
    return any(name == unit or name.startswith(f"{unit}.") for unit in units)


def _absent_units(model: nn.Module) -> list[tuple[nn.Module, str, AbsentUnit]]:
    """Parent, name and stand-in of every unit that was taken out of `model`."""
    found = [(parent, name, child) for parent in model.modules() for name, child in parent._modules.items()]
    return [(parent, name, child) for parent, name, child in found if isinstance(child, AbsentUnit)]


@contextmanager
def whole_model_shown(model: nn.Module) -> Iterator[None]:
    """Shows units of other ranks as ghosts, so that code that looks at names, types and shapes sees the whole model."""
    with shown([(parent, name, child.ghost) for parent, name, child in _absent_units(model)]):
        yield


def tied_places(model: nn.Module) -> list[tuple[nn.Module, str, nn.Parameter]]:
    """Where ghosts show a parameter that this rank holds: `(module, attribute, parameter)`."""
    ghosts = [each for _, _, unit in _absent_units(model) for each in unit.ghost.modules()]
    places = [(ghost, name, parameter) for ghost in ghosts for name, parameter in ghost._parameters.items()]
    return [(ghost, name, each) for ghost, name, each in places if each is not None and not is_ghost(each)]


def put_gates(model: nn.Module, units: Sequence[str], absent: set[str], context: StageContext) -> None:
    """Puts gates on the units that are left; after the transforms that look at a layer's class."""
    context.units = units
    for index, name in enumerate(units):
        if name not in absent:
            _put_gate(model.get_submodule(name), index, name, context)


@cache
def _gated(kind: type[Any]) -> Any:
    """One class for all units of a kind, so that they still run the same code where it is compiled."""
    return type(kind.__name__, (_Gate, kind), {"__module__": kind.__module__, "__qualname__": kind.__qualname__})


def _put_gate(unit: nn.Module, index: int, name: str, context: StageContext) -> None:
    unit.__class__ = _gated(cast("Any", type(unit)))
    object.__setattr__(unit, "_stage_context", context)
    object.__setattr__(unit, "_unit_index", index)
    object.__setattr__(unit, "_unit_name", name)
