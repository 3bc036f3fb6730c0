"""What every sharding shares: taking gradients aside, handing them over, partial sums, gradients that some ranks lack.

A step goes: `begin` (the module computes with whole parameters) -> the schedule is played -> `end` (the module shows what the
optimizer updates) -> `take` -> `hand_over(scale)` for every batch of an accumulation window -> `reduce` once at its end.
An evaluation, which may come in the middle of a window, goes: `begin` -> the schedule is played -> `end` -> `put_back`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hybrid_strategy.distributed.coalesced import all_reduce_coalesced
from hybrid_strategy.distributed.groups import Groups
from hybrid_strategy.parallel.outside import OutsideCalls
from hybrid_strategy.parallel.parameters import Slot, fill, in_place_of


class Sharding(ABC):
    """One sharding of one module's parameters.

    Args:
        slots: all parameters of this rank.
        groups: who holds the other pieces.
        device: where parameters live.
    """

    reduce_dtype: torch.dtype | None = None
    """The type in which gradients travel and are summed over data-parallel ranks; `None`: their own."""

    def __init__(self, slots: Sequence[Slot], groups: Groups, device: torch.device) -> None:
        self.slots, self.groups, self.device = list(slots), groups, device
        self._fresh: list[Tensor | None] = []

    @property
    def trainable(self) -> list[Slot]:
        """Slots that take part in training now; a parameter may be frozen or unfrozen between steps."""
        return [slot for slot in self.slots if self.optimizer_parameter(slot).requires_grad]

    @abstractmethod
    def optimizer_parameter(self, slot: Slot) -> nn.Parameter:
        """What the optimizer updates: the parameter itself, or this rank's rows of it."""

    @abstractmethod
    def materialise(self, slot: Slot, whole: Tensor) -> None:
        """Gives a parameter on the meta device its values, from the whole parameter."""

    def attach(self) -> None:
        """Called once, when all parameters have values: shows the optimizer's parameters in the module."""

    def cover(self, root: nn.Module, outside: OutsideCalls) -> None:
        """Called once after `attach`: `root` may be called outside of steps too."""

    def begin(self) -> None:
        """Makes the module compute with whole parameters and starts with empty gradients."""

    def end(self) -> None:
        """Shows the optimizer's parameters in the module again."""

    def put_back(self) -> None:
        """After an evaluation: the gradients of the accumulation window are as they were before `begin`."""

    def reduce_early(self, slots: Sequence[Slot]) -> None:
        """The next play is the only one of its window: gradients of `slots`, each in one stage, may be reduced as they come."""

    def first_half(self) -> AbstractContextManager[None]:
        """Around the first half of a split backward pass: gradients stay incomplete until `after_backward`."""
        return nullcontext()

    def before_weight(self, weight: nn.Parameter) -> None:
        """Called in the second half before the gradient of a weight that waited for it is made."""

    def before_last_backward(self, slots: Sequence[Slot]) -> None:
        """Called before the last backward pass of the stage that holds `slots`."""

    def after_last_backward(self, slots: Sequence[Slot]) -> None:
        """Called after it."""

    def after_backward(self, slots: Sequence[Slot]) -> None:
        """Called after each backward pass of the stage that holds `slots`."""

    def mark_changed(self) -> None:
        """The optimizer's parameters were changed: whole parameters are out of date."""

    @abstractmethod
    def take(self) -> None:
        """Takes the gradients of the step just played aside."""

    @abstractmethod
    def hand_over(self, scale: float) -> None:
        """Adds the gradients taken aside, times `scale`, to those of the accumulation window."""

    @abstractmethod
    def reduce(self) -> None:
        """Sums the window's gradients over the data-parallel ranks, into `.grad` of the optimizer's parameters."""


def owned_once(slot: Slot, mine: bool) -> None:
    """The optimizer holds the same piece on several data-parallel ranks; `mine` says whether this one is the owner."""
    slot.shard_spec = replace(slot.spec, owner=slot.spec.owner and mine)


def scaled(gradients: Sequence[Tensor | None], scale: float) -> list[Tensor | None]:
    """Multiplies gradients in place by `scale`."""
    present = [gradient for gradient in gradients if gradient is not None]
    if scale != 1.0 and present:
        torch._foreach_mul_(present, scale)
    return list(gradients)


def accumulated(window: Sequence[Tensor | None], fresh: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The sum of two lists of gradients, reusing the memory of the first; `None` counts as nothing."""
    both = [(old, new) for old, new in zip(window, fresh, strict=True) if old is not None and new is not None]
    if both:
        torch._foreach_add_([old for old, _ in both], [new for _, new in both])
    return [new if old is None else old for old, new in zip(window, fresh, strict=True)]


class Kept:
    """Gradients that were reduced before and that nobody has zeroed since: whole already, so they are added afterwards."""

    def __init__(self) -> None:
        self._whole = False
        self._values: list[Tensor | None] = []

    def set_aside(self, window: list[Tensor | None]) -> list[Tensor | None]:
        """Takes them out of the window that now begins; returns what is left of it."""
        if not self._whole:
            return window
        self._whole, self._values = False, window
        return [None] * len(window)

    def add_to(self, parameters: Sequence[nn.Parameter]) -> None:
        """The window has been reduced into `.grad` of the parameters."""
        for parameter, value in zip(parameters, self._values or [None] * len(parameters), strict=True):
            if value is not None:
                parameter.grad = value if parameter.grad is None else parameter.grad + value
        self._whole, self._values = True, []


class Presence:
    """Agrees on gradients that only some ranks have: those count as zeros elsewhere; one that nobody has stays absent."""

    def __init__(self, gradients: Sequence[Tensor | None], group: dist.ProcessGroup | None, device: torch.device) -> None:
        self._missing = [index for index, gradient in enumerate(gradients) if gradient is None]
        self._work: dist.Work | None = None
        if group is not None:
            self._counts = torch.tensor([float(each is not None) for each in gradients], device=device)
            self._work = dist.all_reduce(self._counts, group=group, async_op=True)

    def absent_everywhere(self) -> set[int]:
        """Indices of gradients that no rank of the group has."""
        if self._work is None:
            return set(self._missing)
        self._work.wait()
        return {index for index in self._missing if self._counts[index].item() == 0}


def sum_over(
    slots: Sequence[Slot],
    gradients: list[Tensor | None],
    group: dist.ProcessGroup | None,
    dtype: torch.dtype | None = None,
) -> list[Tensor | None]:
    """Sums gradients over `group`, as `dtype`; zeros where only other ranks had one, `None` where nobody had."""
    if group is None or not slots:
        return gradients
    presence = Presence(gradients, group, _device_of(slots))
    filled = [torch.zeros_like(slot.parameter) if g is None else g for slot, g in zip(slots, gradients, strict=True)]
    all_reduce_coalesced(filled, group, dtype)
    absent = presence.absent_everywhere()
    return [None if index in absent else gradient for index, gradient in enumerate(filled)]


def sum_partial(slots: Sequence[Slot], gradients: list[Tensor | None], groups: Groups) -> list[Tensor | None]:
    """Completes gradients that are partial sums: over tensor ranks (sequence parallelism), over pipeline ranks (shared)."""
    partial = [index for index, slot in enumerate(slots) if slot.spec.partial_gradient]
    parts = [(partial, groups.tensor)]
    for holders in sorted({slot.holders for slot in slots if slot.holders}):
        parts.append(([index for index, slot in enumerate(slots) if slot.holders == holders], groups.among[holders]))
    for chosen, group in parts:
        summed = sum_over([slots[i] for i in chosen], [gradients[i] for i in chosen], group)
        for i, gradient in zip(chosen, summed, strict=True):
            gradients[i] = gradient
    return gradients


def materialise_whole(slot: Slot, whole: Tensor, device: torch.device) -> None:
    """Puts a real parameter with this rank's piece of `whole` where a meta parameter stood."""
    local = torch.empty(slot.spec.sizes, dtype=whole.dtype, device=device)
    fill(local, whole, slot.spec)
    slot.parameter = in_place_of(slot.parameter, local)
    slot.put(slot.parameter)


def _device_of(slots: Sequence[Slot]) -> torch.device:
    return slots[0].parameter.device
