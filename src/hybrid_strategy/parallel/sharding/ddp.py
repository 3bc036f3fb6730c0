"""`ddp`: every data-parallel rank holds everything; gradients are summed by all-reduce, once an optimizer step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hybrid_strategy.distributed.groups import Groups
from hybrid_strategy.parallel.parameters import Slot
from hybrid_strategy.parallel.sharding._base import (
    Kept,
    Sharding,
    accumulated,
    materialise_whole,
    owned_once,
    scaled,
    sum_over,
    sum_partial,
)
from hybrid_strategy.parallel.sharding._early import EarlyReduction, Finish


class ReplicatedSharding(Sharding):
    """Gradients live in `.grad` of the parameters, where Lightning's zero_grad and the user's hooks expect them."""

    def __init__(self, slots: Sequence[Slot], groups: Groups, device: torch.device) -> None:
        super().__init__(slots, groups, device)
        self._window: list[Tensor | None] = []
        self._early = EarlyReduction(self._start)
        self._kept = Kept()
        for slot in self.slots:
            owned_once(slot, groups.is_first_replica)

    def optimizer_parameter(self, slot: Slot) -> nn.Parameter:
        return slot.parameter

    def materialise(self, slot: Slot, whole: Tensor) -> None:
        materialise_whole(slot, whole, self.device)

    def reduce_early(self, slots: Sequence[Slot]) -> None:
        if self.groups.gradient is not None:
            self._early.want(slots)

    def before_last_backward(self, slots: Sequence[Slot]) -> None:
        self._early.expect(slots)

    def after_last_backward(self, slots: Sequence[Slot]) -> None:
        self._early.complete(slots)

    def begin(self) -> None:
        self._window = [slot.parameter.grad for slot in self.slots]
        for slot in self.slots:
            slot.parameter.grad = None
        self._early.begin()

    def take(self) -> None:
        self._early.flush()
        self._fresh = [slot.parameter.grad for slot in self.slots]
        self.put_back()

    def put_back(self) -> None:
        for slot, gradient in zip(self.slots, self._window, strict=True):
            slot.parameter.grad = gradient
        self._window = []

    def hand_over(self, scale: float) -> None:
        self._early.scale = scale
        fresh = scaled(self._fresh, scale)
        window = self._kept.set_aside([slot.parameter.grad for slot in self.slots])
        for slot, gradient in zip(self.slots, accumulated(window, fresh), strict=True):
            slot.parameter.grad = gradient
        self._fresh = []

    def reduce(self) -> None:
        early = [slot for slot in self.trainable if self._early.covers(slot)]
        slots = [slot for slot in self.trainable if not self._early.covers(slot)]
        gradients = sum_partial(slots, [slot.parameter.grad for slot in slots], self.groups)
        summed = sum_over(slots, gradients, self.groups.gradient, self.reduce_dtype)
        for slot, gradient in zip(slots, summed, strict=True):
            slot.parameter.grad = gradient
        reduced = self._early.finish(early, self.groups.gradient, self.device)
        for slot, gradient in zip(early, reduced, strict=True):
            slot.parameter.grad = gradient
        self._kept.add_to([slot.parameter for slot in self.slots])

    def _start(self, slots: list[Slot]) -> Finish:
        """Starts the all-reduce of a bucket; the gradients become views of the message."""
        parameters = [slot.parameter for slot in slots]
        gradients = [torch.zeros_like(each) if each.grad is None else each.grad for each in parameters]
        for each in parameters:
            each.grad = None
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        flat = flat.to(self.reduce_dtype or flat.dtype)
        work = dist.all_reduce(flat, group=self.groups.gradient, async_op=True)

        def finish() -> list[Tensor]:
            if work is not None:
                work.wait()
            whole = flat.to(parameters[0].dtype)
            pieces = torch.split(whole, [each.numel() for each in parameters])
            return [piece.view_as(each) for piece, each in zip(pieces, parameters, strict=True)]

        return finish


class Part:
    """The registered part."""

    name = "ddp"

    @staticmethod
    def create(slots: Sequence[Slot], groups: Groups, device: torch.device, units: Sequence[nn.Module] = ()) -> Sharding:
        return ReplicatedSharding(slots, groups, device)


PART = Part()
