"""Starts the reduction of gradients over data-parallel ranks while the backward pass that completes them still runs.

Buckets go out strictly in their order, which is the same on every rank, whatever the order in which a rank's gradients come: a
bucket waits for those before it, and what is left goes out when the schedule has been played. So no two ranks ever wait for each
other, also where a rank lacks a gradient or plays fewer micro-batches.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from hybrid_strategy.distributed.coalesced import buckets
from hybrid_strategy.parallel.parameters import Slot
from hybrid_strategy.parallel.sharding._base import Presence, scaled

EARLY_BUCKET_BYTES = 8 * 2**20
"""Small enough that the last one, which nothing hides, is short; large enough that latency does not count."""

Finish = Callable[[], list[Tensor]]
"""Waits for a bucket; returns what the optimizer gets for each of its slots."""


class _Bucket:
    def __init__(self, slots: list[Slot]) -> None:
        self.slots, self.missing = slots, len(slots)
        self.finish: Finish | None = None


class EarlyReduction:
    """Early reduction of one sharding's gradients.

    Args:
        start: starts the reduction of a bucket whose gradients are in `.grad` of its parameters (or `None`), without waiting,
            and takes the gradients away.
    """

    def __init__(self, start: Callable[[list[Slot]], Finish]) -> None:
        self._start = start
        self._wanted: list[Slot] = []
        self._buckets: list[_Bucket] = []
        self._home: dict[int, _Bucket] = {}
        self._expected: set[int] = set()
        self._hooked: set[int] = set()
        self._next = 0
        self._present: set[str] = set()
        self.scale = 1.0

    def want(self, slots: Sequence[Slot]) -> None:
        """The next play completes the gradients of `slots`, each in one stage: they may go out as they come."""
        self._wanted = list(slots)

    def begin(self) -> None:
        """A play begins."""
        slots = [slot for slot in reversed(self._wanted) if slot.parameter.requires_grad]
        self._wanted = []
        chosen = buckets([slot.parameter for slot in slots], EARLY_BUCKET_BYTES)
        self._buckets = [_Bucket([slots[index] for index in indices]) for indices in chosen]
        self._home = {id(slot.parameter): bucket for bucket in self._buckets for slot in bucket.slots}
        self._expected, self._next, self.scale, self._present = set(), 0, 1.0, set()
        for slot in slots:
            if id(slot.parameter) not in self._hooked:
                self._hooked.add(id(slot.parameter))
                slot.parameter.register_post_accumulate_grad_hook(_weakly(self))

    def covers(self, slot: Slot) -> bool:
        """Is the gradient of this slot reduced here in the step at hand?"""
        return id(slot.parameter) in self._home

    def expect(self, slots: Sequence[Slot]) -> None:
        """The last backward pass of the stage that holds `slots` begins: gradients that come now are whole."""
        self._expected.update(id(slot.parameter) for slot in slots if self.covers(slot))

    def complete(self, slots: Sequence[Slot]) -> None:
        """That pass is over: what has not come does not come any more."""
        for slot in slots:
            self.arrived(slot.parameter)

    def flush(self) -> None:
        """The play is over: sends what has not been sent."""
        while self._next < len(self._buckets):
            self._send()

    def finish(self, slots: Sequence[Slot], group: dist.ProcessGroup | None, device: torch.device) -> list[Tensor | None]:
        """Waits for all; the reduced gradients of `slots`, once. One that no rank of the group has stays absent."""
        if not slots:
            return []
        present = [slot.parameter if slot.name in self._present else None for slot in slots]
        presence = Presence(present, group, device)
        found: dict[str, Tensor] = {}
        for bucket in self._buckets:
            if bucket.finish is not None:
                found.update(zip((slot.name for slot in bucket.slots), bucket.finish(), strict=True))
        self._buckets, self._home = [], {}
        absent = presence.absent_everywhere()
        return scaled([None if index in absent else found[slot.name] for index, slot in enumerate(slots)], self.scale)

    def arrived(self, parameter: Tensor) -> None:
        """A backward pass has added to the gradient of `parameter`."""
        if id(parameter) in self._expected:
            self._expected.discard(id(parameter))
            self._home[id(parameter)].missing -= 1
            while self._next < len(self._buckets) and not self._buckets[self._next].missing:
                self._send()

    def _send(self) -> None:
        bucket = self._buckets[self._next]
        self._next += 1
        self._present.update(slot.name for slot in bucket.slots if slot.parameter.grad is not None)
        bucket.finish = self._start(bucket.slots)


def _weakly(early: EarlyReduction) -> Callable[[Tensor], None]:
    """A hook that keeps nothing alive: torch holds hooks where Python cannot see the cycle back to the parameter."""
    reference = weakref.ref(early)

    def arrived(parameter: Tensor) -> None:
        found = reference()
        if found is not None:
            found.arrived(parameter)

    return arrived
