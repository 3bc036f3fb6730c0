"""Pipeline stages of an unmodified model: the whole model with the units of other ranks taken out, no name changed.

Every rank runs the model's own `forward`. While it plays stage `s`, which holds the units `start .. stop - 1`:

- a unit before `start` is skipped. Unit `start - 1` returns what was received from the stage before: it is the only live value
  that crosses a cut. Earlier units return stand-ins of NaN; what `forward` does with them is thrown away, and where it is not (a
  second value crosses the cut: an encoder's memory, a skip connection) the first play finds NaN in a unit's input and says so;
- the output of unit `stop - 1` leaves `forward` at once, carried by `StageOutput`, unless the stage is the last one.

So one model object per rank serves all of its stages, and `self.model(...)` in the user's step is all that is needed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from hybrid_strategy.errors import ModelError, message
from hybrid_strategy.parallel.activation_checkpoint import without_reentry
from hybrid_strategy.parallel.ghosts import ghost_of, is_ghost, shown
from hybrid_strategy.parallel.outside import OutsideCalls
from hybrid_strategy.parallel.past_layers import LayerWatch
from hybrid_strategy.parallel.side_values import Place
from hybrid_strategy.parallel.step_random import StepRandom
from hybrid_strategy.parallel.trees import has_nan, iterate_tensors, map_tensors
from hybrid_strategy.parallel.valueless import lose
from hybrid_strategy.spec.parallel_plan import matches


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


def _as_it_is(value: Any) -> Any:
    return value


@dataclass
class Look:
    """What a rank notes in a step that is looked at closely, for all ranks to compare after it.

    Attributes:
        inputs: what the first unit is called with for the first micro-batch.
        refused: what the step may not do.
        output: of the last unit, until the loss is made.
        kept: where layers of earlier stages have kept values beside their output.
        taken: where the loss has taken such values of the last stage.
    """

    inputs: list[Tensor] = field(default_factory=list)
    refused: list[ModelError] = field(default_factory=list)
    output: Any = None
    kept: set[Place] = field(default_factory=set)
    taken: set[Place] = field(default_factory=set)


class StageContext:
    """Shared by all gates of a model; `now` is `None` while no stage is being played, and then the gates are open.

    Args:
        random: the random states of steps.
    """

    def __init__(self, random: StepRandom | None = None) -> None:
        self.look: Look | None = None
        self.layers = LayerWatch(self.refuse)
        self.outside = OutsideCalls()
        self.random = random or StepRandom(torch.device("cpu"), shared=False)
        self.now: StageNow | None = None
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
        """The first time a unit is played: refuses a value that an earlier unit than the last has made.

        Raises:
            ModelError: a stand-in has come to this unit.
        """
        split = self.arriving is not _as_it_is  # a part of a sequence cannot be looked at as a whole one
        if self.now is None or self.now.received is None or unit in self._checked or split:
            return
        self._checked.add(unit)
        if has_nan(inputs) and not has_nan(self.now.received):
            rule = "only the output of the unit before it crosses a cut, and it is given a value that an earlier unit made"
            advice = "Let the units in between hand it on, e.g. return (memory, x), or cut elsewhere with stage_cuts"
            self.refuse(ModelError(message("parallel_plan.units", unit, rule, "", advice)))

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around the passes of a step."""
        with self.outside.step(), self.random.step(), without_reentry(self.random.shared):
            yield

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


class AbsentUnit(nn.Module):
    """Stands where a unit of another rank stood. Answers for the unit's plain attributes, holds no parameter."""

    def __init__(self, unit: nn.Module, index: int, context: StageContext, ghost: nn.Module) -> None:
        super().__init__()
        kept = {name: value for name, value in vars(unit).items() if not name.startswith("_") and name != "training"}
        object.__setattr__(self, "_kept", kept)
        object.__setattr__(self, "_context", context)
        object.__setattr__(self, "_unit_index", index)
        object.__setattr__(self, "ghost", ghost)

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
        if name in kept:
            return kept[name]
        with contextlib.suppress(AttributeError):
            return super().__getattr__(name)
        rule = "this rank holds only its own stages, and a unit of another pipeline rank was asked for its layers or weights"
        advice = "Use them inside of that unit's forward, or set pipeline_parallel_size=1"
        raise AttributeError(
            message("module", "the pipeline's model", rule, f"{name!r} of unit {self.__dict__.get('_unit_index')}", advice)
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        now = self._context.now
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
    return context.arriving(output)


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
        if now is not None:
            context.note_step_inputs(self._unit_index, iterate_tensors((args, kwargs)))
            context.check_inputs(self._unit_name, (args, kwargs))
        with context.outside.call(), context.random.unit(), context.layers.inside(self._unit_index):
            output = super().__call__(*args, **kwargs)  # type: ignore[misc]
        if now is not None and self._unit_index == now.stop - 1 and not now.is_last:
            raise StageOutput(context.leaving(output))
        if now is not None and self._unit_index == now.stop - 1 and context.look is not None:
            context.look.output = output
        return output


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
