"""Gates on a model's units: whole sequences become parts on the way in, and look whole on the way out."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

from torch import Tensor, nn

from hybrid_strategy.errors import ModelError, message
from hybrid_strategy.parallel.context.arguments import Arguments, UnitCall
from hybrid_strategy.parallel.context.attention import attend_to_whole, prepare_masks
from hybrid_strategy.parallel.context.region import ContextRegion
from hybrid_strategy.parallel.context.sequence import Part, SplitSequence
from hybrid_strategy.parallel.context.span import SequenceSpan
from hybrid_strategy.parallel.context.trial import try_unit
from hybrid_strategy.parallel.tensor.random import draws_random_numbers
from hybrid_strategy.parallel.trees import map_tensors


class _Gate:
    """Mixed into a unit's class."""

    _context_entry: UnitEntry

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._context_entry.call(super().__call__, args, kwargs)  # type: ignore[misc]


class UnitEntry:
    """How one unit is entered and left.

    Args:
        unit: the unit, whose class is still its own.
        name: its name in the model.
        region: the ranks.
        declared: argument -> its sequence dimension, where it cannot be told from its shape.
    """

    def __init__(self, unit: nn.Module, name: str, region: ContextRegion, declared: Mapping[str, int | None]) -> None:
        self.unit, self.name, self.kind, self.region = unit, name, type(unit), region
        self._arguments = Arguments(_positional_names(type(unit)), declared)
        self._draws, self._tried = draws_random_numbers(unit), False

    def call(self, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One call of the unit."""
        call = None if self.region.trying else UnitCall.of(self.region, self._arguments, args, kwargs)
        if call is None:
            return run(*args, **kwargs)
        if not self._tried:
            try_unit(self.unit, self.kind, self.name, call, args, kwargs)
            self._tried = True
        prepare_masks(self.region, call.span.length)
        own_args, own_kwargs = call.parts(args, kwargs)
        with self.region.own_random_numbers(self._draws and self.unit.training, call.first.device):
            output = run(*own_args, **own_kwargs)
        return call.joined(output)


def _positional_names(kind: type[nn.Module]) -> tuple[str, ...]:
    try:
        parameters = list(inspect.signature(kind.forward).parameters.values())[1:]
    except (TypeError, ValueError):  # a forward without a signature
        return ()
    return tuple(each.name for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD))


def put_context_gates(
    model: nn.Module,
    units: Collection[str],
    recomputed: Collection[str],
    region: ContextRegion,
    declared: Mapping[str, int | None],
) -> None:
    """Cuts sequences at the gates of `units`; before `checkpoint_units`, so that what is recomputed attends to whole sequences.

    Args:
        recomputed: names of the modules that are recomputed in the backward pass.
    """
    for name in sorted({*units, *(each for each in recomputed if _is_below(each, units))}):
        attend_to_whole(model.get_submodule(name), region, _is_below(name, recomputed))
    for name in units:
        unit = model.get_submodule(name)
        entry = UnitEntry(unit, name, region, declared)
        kind = type(unit)
        unit.__class__ = type(kind.__name__, (_Gate, kind), {"__module__": kind.__module__, "__qualname__": kind.__qualname__})
        object.__setattr__(unit, "_context_entry", entry)


def _is_below(name: str, others: Collection[str]) -> bool:
    return any(name == other or name.startswith(f"{other}.") for other in others)


def check_units(model: nn.Module, units: Collection[str], styled: Collection[str], region: ContextRegion) -> None:
    """Refuses a model whose sequences cannot be cut at units.

    Args:
        styled: names of the modules that tensor parallelism has changed.

    Raises:
        ModelError: no units; or a module between them works on activations that sequence parallelism has cut.
    """
    if not units:
        rule = f"{type(model).__name__} does not say between which modules sequences may be cut"
        numbers = f"its children are {', '.join(name for name, _ in model.named_children())}"
        advice = "Give the module parallel_plan() returning ParallelPlan(units=(...)) in the order of forward, or set 1"
        raise ModelError(message("context_parallel_size", region.size, rule, numbers, advice))
    between = [name for name in styled if not _is_below(name, units)]
    if between and region.tensor_size > 1:
        rule = "with sequence_parallel every module that tensor parallelism splits must lie in a unit"
        numbers = f"{', '.join(between[:4])} lie between the units"
        advice = "Add them to ParallelPlan.units, or set sequence_parallel=False or context_parallel_size=1"
        raise ModelError(message("context_parallel_size", region.size, rule, numbers, advice))


def close_for_sending(output: Any) -> Any:
    """A stage's output as it travels to another stage: parts instead of shells."""

    def part(_: Any, tensor: Tensor) -> Any:
        if not isinstance(tensor, SplitSequence):
            return tensor
        if tensor.whole is not None or not tensor.span.is_fresh() or tensor.cut_dim != 1:
            return tensor.full_tensor()
        return Part(tensor.local, tensor.span.length, tensor.span.scattered)

    return map_tensors(part, output)


def open_received(region: ContextRegion, received: Any) -> Any:
    """What a stage received, with every part of a sequence in a shell again."""

    def shell(_: Any, leaf: Any) -> Any:
        return (
            SplitSequence.wrap(leaf.local, SequenceSpan.of(region, leaf.length, leaf.scattered))
            if isinstance(leaf, Part)
            else leaf
        )

    return map_tensors(shell, received, is_leaf=lambda value: isinstance(value, Part | Tensor))
