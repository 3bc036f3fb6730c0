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
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, cast

import torch
from torch import nn

from hybrid_strategy.errors import ModelError, message
from hybrid_strategy.parallel.ghosts import ghost_of, is_ghost, shown
from hybrid_strategy.parallel.stage_context import StageContext
from hybrid_strategy.parallel.stage_now import StageNow, left_out
from hybrid_strategy.parallel.stand_ins import marked
from hybrid_strategy.parallel.trees import iterate_tensors, map_tensors
from hybrid_strategy.parallel.valueless import lose

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
        raise AttributeError(str(self._missing(name)))

    def _missing(self, name: str) -> ModelError:
        """What the unit has and this rank has not; told even where the model's code goes on (`getattr` with a default)."""
        rule = "this rank holds only its own stages, and a unit of another pipeline rank was asked for its layers or weights"
        advice = "Use them inside of that unit's forward, or set pipeline_parallel_size=1"
        number, ghost = self.__dict__.get("_unit_index"), self.__dict__.get("ghost")
        refusal = ModelError(message("module", "the pipeline's model", rule, f"{name!r} of unit {number}", advice))
        if ghost is not None and self._context.look is not None and self._context.now is not None and hasattr(ghost, name):
            self._context.refuse(refusal)
        return refusal

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
    return context.arriving(output if is_real else marked(output, index, context.note_use))


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
