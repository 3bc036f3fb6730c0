"""Weights of layers that tensor-parallel ranks split, used by a step outside of their layers: refused.

A rank has a piece of a sliced weight, and of the gradient of a replicated one (a norm's under sequence parallelism, whose ranks
see other tokens) it makes a part: the sum over the ranks is the gradient. A norm of weights in the loss would be of a piece, or
count once a rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from hybrid_strategy.errors import ModelError, message
from hybrid_strategy.parallel.parameters import Slot
from hybrid_strategy.parallel.valueless import lose, regain


def raise_it(error: ModelError) -> None:
    raise error


def refuse_past_layers(slot: Slot, refuse: Callable[[ModelError], None] = raise_it) -> None:
    """A step uses the parameter outside of its layer: refused where it would count otherwise than on one device.

    Without gradients it is what this rank holds.
    """
    if not torch.is_grad_enabled() or not is_made_in_parts(slot):
        return
    rule = "a step used a weight of a layer that tensor-parallel ranks split, outside of that layer's forward"
    sliced = slot.spec.sizes != slot.spec.full_shape
    numbers = "Each rank holds a piece of it" if sliced else "Each rank makes a part of its gradient, and these are summed"
    advice = "Use weight_decay of the optimizer instead of a norm in the loss, or set tensor_parallel_size=1"
    refuse(ModelError(message("training_step", slot.name, rule, numbers, advice)))


def is_made_in_parts(slot: Slot) -> bool:
    """Do tensor-parallel ranks hold pieces of it, or make parts of its gradient?"""
    return slot.spec.partial_gradient or slot.spec.sizes != slot.spec.full_shape


class LayerWatch:
    """Notices such uses, in the steps that are looked at.

    Args:
        refuse: is told of them.
    """

    def __init__(self, refuse: Callable[[ModelError], None]) -> None:
        self._refuse = refuse
        self._slots: Sequence[Slot] = ()
        self._of_unit: Mapping[int, Sequence[Slot]] = {}
        self._looks = False

    def cover(self, slots: Sequence[Slot], units: Mapping[int, nn.Module]) -> None:
        """Watches the parameters of `units`, by their number: whoever calls one has a right to its weights."""
        found: dict[int, list[Slot]] = {}
        for index, unit in units.items():
            inside = {id(each) for each in unit.modules()}
            found[index] = [
                slot for slot in slots if is_made_in_parts(slot) and any(id(owner) in inside for owner, _ in slot.places)
            ]
        self._of_unit = found
        self._slots = list({id(slot): slot for each in found.values() for slot in each}.values())

    def __deepcopy__(self, memo: dict[int, Any]) -> LayerWatch:
        """Copied layers have weights of their own, which nobody watches."""
        return LayerWatch(self._refuse)

    @contextmanager
    def step(self, looks: bool) -> Iterator[None]:
        """Around a forward pass of a step; `looks`: notice uses in it. A backward pass may compute layers again."""
        self._looks = looks and bool(self._slots)
        if not self._looks:
            yield
            return
        self._lose(self._slots)
        try:
            yield
        finally:
            self._looks = False
            for slot in self._slots:
                regain(slot.parameter)

    @contextmanager
    def inside(self, index: int) -> Iterator[None]:
        """Around a call of a unit."""
        with self.used(self._of_unit.get(index, ())):
            yield

    @contextmanager
    def used(self, own: Sequence[Slot] | None = None) -> Iterator[None]:
        """Around a rightful use of parameters; default: of all."""
        if not self._looks:
            yield
            return
        own = self._slots if own is None else own
        for slot in own:
            regain(slot.parameter)
        yield
        self._lose(own)

    def _lose(self, slots: Sequence[Slot]) -> None:
        for slot in slots:
            lose(slot.parameter, partial(refuse_past_layers, slot, self._refuse))
