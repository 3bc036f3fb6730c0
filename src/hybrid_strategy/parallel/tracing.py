"""What one forward pass of a model shows of it: which modules are called, in which order, and where a pipeline could cut."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise

import torch
from torch import Tensor, nn

from hybrid_strategy.errors import ModelError
from hybrid_strategy.parallel.look import needs_refused
from hybrid_strategy.parallel.stage_context import StageContext
from hybrid_strategy.parallel.stage_now import Crossing, StageNow, StageOutput
from hybrid_strategy.parallel.stages import put_gates
from hybrid_strategy.parallel.units import find_carried

_MAIN_SHARE = 0.2
"""A child that has a list of layers somewhere, and more of the parameters than this, is looked into."""


@contextmanager
def traced(model: nn.Module) -> Iterator[list[str]]:
    """The names of the modules of `model` in the order in which they are called."""
    called: list[str] = []

    def note(name: str) -> Callable[..., None]:
        return lambda *_: called.append(name)

    handles = [each.register_forward_pre_hook(note(name)) for name, each in model.named_modules() if name]
    try:
        yield called
    finally:
        for handle in handles:
            handle.remove()


def proposed_units(model: nn.Module, called: Sequence[str]) -> list[str]:
    """Units in the order of their calls: layers of lists, and the children beside them that have parameters."""
    first = {name: index for index, name in reversed(list(enumerate(called)))}
    return sorted(_units_below(model, "", first, _size(model)), key=first.__getitem__)


def _units_below(model: nn.Module, prefix: str, first: dict[str, int], whole: int) -> Iterator[str]:
    for key, child in model.named_children():
        name = f"{prefix}{key}"
        if _size(child) == 0:
            continue
        is_element = isinstance(model, nn.ModuleList)
        holds_lists = any(isinstance(each, nn.ModuleList) for each in child.modules())
        is_list = isinstance(child, (nn.ModuleList, nn.ModuleDict))
        if not is_element and (is_list or (holds_lists and _size(child) > _MAIN_SHARE * whole)):
            yield from _units_below(child, f"{name}.", first, whole)
        elif name in first:
            yield name


def folded(model: nn.Module, units: Sequence[str]) -> list[str]:
    """The units as patterns: all elements of a list in a row are `list.*`."""
    patterns: list[str] = []
    for unit in units:
        parent, _, _ = unit.rpartition(".")
        owner = model.get_submodule(parent) if parent else model
        elements = [f"{parent}.{key}" for key, _ in owner.named_children()]
        complete = isinstance(owner, nn.ModuleList) and [each for each in units if each in elements] == elements
        pattern = f"{parent}.*" if complete else unit
        if not patterns or patterns[-1] != pattern:
            patterns.append(pattern)
    return patterns


def called_often(model: nn.Module, called: Sequence[str]) -> dict[str, int]:
    """Modules with parameters of their own that one forward pass calls more than once, and how often."""
    counts = Counter(called)
    own = {name for name, each in model.named_modules() if any(True for _ in each.parameters(recurse=False))}
    return {name: count for name, count in counts.items() if count > 1 and name in own}


def bad_cuts(model: nn.Module, units: Sequence[str], run: Callable[[], Tensor], carried: Sequence[str] = ()) -> dict[str, str]:
    """Units after which a pipeline must not cut, and why.

    Args:
        run: the user's step on one batch, in evaluation mode; returns the loss.
        carried: units whose outputs go past cuts.
    """
    wanted = run()
    with _gated(model, units, carried) as context:
        last, found = len(units), dict[str, str]()
        if _trouble(context, list(range(last + 1)), run, wanted)[0]:
            found = {units[cut - 1]: _trouble(context, [0, cut, last], run, wanted)[0] for cut in range(1, last)}
    return {unit: why for unit, why in found.items() if why}


def found_carried(model: nn.Module, units: Sequence[str], run: Callable[[], Tensor]) -> list[str]:
    """Units whose outputs must go past cuts, wherever these are; none where that does not make all cuts right."""
    wanted, carried = run(), list[str]()
    for _ in units:
        with _gated(model, units, carried) as context:
            why, needed = _trouble(context, list(range(len(units) + 1)), run, wanted)
        if not why:
            return carried
        more = [unit for unit in units if unit in needed or unit in carried]
        if more == carried:
            break
        carried = more
    return []


@contextmanager
def _gated(model: nn.Module, units: Sequence[str], carried: Sequence[str]) -> Iterator[StageContext]:
    """The model with gates, for a while."""
    context = StageContext()
    context.carried = find_carried(model, units, carried)
    kinds = {name: type(model.get_submodule(name)) for name in units}
    put_gates(model, units, set(), context)
    try:
        yield context
    finally:
        for name, kind in kinds.items():
            model.get_submodule(name).__class__ = kind


def good_units(model: nn.Module, units: Sequence[str], run: Callable[[], Tensor]) -> tuple[list[str], list[str], dict[str, str]]:
    """The units of a plan, those whose outputs it must carry, and what is wrong with cuts all the same.

    Units after which a cut is wrong are left out where that makes all cuts right: what belongs to no unit is held and computed by
    every stage, as with position embeddings that are added to the output of the unit before.
    """
    bad = bad_cuts(model, units, run)
    fewer = [unit for unit in units if unit not in bad]
    if bad and len(fewer) > 1 and not any(unit.rpartition(".")[2].isdigit() for unit in bad) and not bad_cuts(model, fewer, run):
        return fewer, [], {}
    carried = found_carried(model, units, run) if bad else []
    return list(units), carried, {} if carried else bad


def _trouble(context: StageContext, bounds: list[int], run: Callable[[], Tensor], wanted: Tensor) -> tuple[str, set[str]]:
    """What goes wrong when the model is played as these stages, and whose outputs were missing.

    The words are empty where the loss is that of the whole model.
    """
    crossing: Crossing | None = None
    context.forget_checks()
    with context.looking() as look:
        for start, stop in pairwise(bounds):
            try:
                with context.play(StageNow.of(start, stop, stop == bounds[-1], crossing)):
                    loss = run()
            except StageOutput as leaving:
                crossing = leaving.value
            except ModelError as error:
                return str(error), set()
            except Exception as error:  # whatever the user's code raises where units before it were skipped
                if not context.has_failed(error):
                    return f"{type(error).__name__}: {error}", set()
                break
    lacking = needs_refused([look.needs], context.units, context.carried)
    if lacking is not None or look.refused:
        return str(lacking or look.refused[0]), {name for makers in look.needs.values() for name in makers}
    same = torch.allclose(loss.detach().float(), wanted.detach().float(), rtol=1e-5, atol=1e-7)
    return "" if same else f"the loss is {float(loss)}, not {float(wanted)}", set()


def _size(module: nn.Module) -> int:
    return sum(each.numel() for each in module.parameters())
