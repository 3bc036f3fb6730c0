"""`ddp`: every data-parallel rank holds everything; gradients are summed by all-reduce, once an optimizer step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from hybrid_strategy.distributed.groups import Groups
from hybrid_strategy.parallel.parameters import Slot
from hybrid_strategy.parallel.sharding._base import (
    Sharding,
    accumulated,
    materialise_whole,
    owned_once,
    scaled,
    sum_over,
    sum_partial,
)


class ReplicatedSharding(Sharding):
    """Gradients live in `.grad` of the parameters, where Lightning's zero_grad and the user's hooks expect them."""

    def __init__(self, slots: Sequence[Slot], groups: Groups, device: torch.device) -> None:
        super().__init__(slots, groups, device)
        self._window: list[Tensor | None] = []
        for slot in self.slots:
            owned_once(slot, groups.coordinate.data_parallel == 0)

    def optimizer_parameter(self, slot: Slot) -> nn.Parameter:
        return slot.parameter

    def materialise(self, slot: Slot, whole: Tensor) -> None:
        materialise_whole(slot, whole, self.device)

    def begin(self) -> None:
        self._window = [slot.parameter.grad for slot in self.slots]
        for slot in self.slots:
            slot.parameter.grad = None

    def take(self) -> None:
        self._fresh = [slot.parameter.grad for slot in self.slots]
        self.put_back()

    def put_back(self) -> None:
        for slot, gradient in zip(self.slots, self._window, strict=True):
            slot.parameter.grad = gradient
        self._window = []

    def hand_over(self, scale: float) -> None:
        fresh = scaled(self._fresh, scale)
        window = [slot.parameter.grad for slot in self.slots]
        for slot, gradient in zip(self.slots, accumulated(window, fresh), strict=True):
            slot.parameter.grad = gradient
        self._fresh = []

    def reduce(self) -> None:
        slots = self.trainable
        gradients = sum_partial(slots, [slot.parameter.grad for slot in slots], self.groups)
        for slot, gradient in zip(slots, sum_over(slots, gradients, self.groups.data), strict=True):
            slot.parameter.grad = gradient


class Part:
    """The registered part."""

    name = "ddp"

    @staticmethod
    def create(slots: Sequence[Slot], groups: Groups, device: torch.device, units: Sequence[nn.Module] = ()) -> Sharding:
        return ReplicatedSharding(slots, groups, device)


PART = Part()
