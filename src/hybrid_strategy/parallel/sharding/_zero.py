"""ZeRO 1 and 2 (arXiv:1910.02054): whole parameters stay on every rank, gradients are reduce-scattered and whole parameters
all-gathered once an optimizer step, however many micro-batches it has; the optimizer updates this rank's rows only.

The optimizer's parameter is a view of this rank's rows of the whole one, so it costs no memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from hybrid_strategy.distributed.coalesced import all_reduce_coalesced, buckets
from hybrid_strategy.distributed.groups import Groups
from hybrid_strategy.parallel.parameters import Slot, in_place_of
from hybrid_strategy.parallel.sharding._base import (
    Kept,
    Presence,
    Sharding,
    accumulated,
    materialise_whole,
    owned_once,
    scaled,
    sum_over,
    sum_partial,
)
from hybrid_strategy.parallel.sharding._early import EarlyReduction, Finish
from hybrid_strategy.parallel.sharding._flat import FlatLayout, all_gather, reduce_scatter, reduce_scatter_started
from hybrid_strategy.spec.shard import even_chunk


class RowSharding(Sharding):
    """The optimizer owns rows (dimension 0) of every parameter; a parameter without a dimension stays whole.

    Args:
        free_early: give a bucket's whole gradients back as soon as it is reduced (ZeRO-2), else after all are (ZeRO-1).
    """

    def __init__(self, slots: Sequence[Slot], groups: Groups, device: torch.device, free_early: bool) -> None:
        super().__init__(slots, groups, device)
        self._free_early = free_early
        self._parts = groups.layout.state_shards
        self._index = groups.state_shard
        self._rows: dict[str, nn.Parameter] = {}
        self._window: list[Tensor | None] = [None] * len(self.slots)
        self._stale = False
        self._early = EarlyReduction(self._start)
        self._kept = Kept()
        self._set_aside: list[Tensor | None] = []
        for slot in self.slots:
            if slot.spec.sizes:
                start, size = even_chunk(slot.spec.sizes[0], self._parts, self._index)
                slot.narrow_spec(start, size, slot.spec.owner and groups.coordinate.data_parallel_replicate == 0)
            else:
                owned_once(slot, groups.is_first_replica)

    def optimizer_parameter(self, slot: Slot) -> nn.Parameter:
        return self._rows.get(slot.name, slot.parameter)

    def materialise(self, slot: Slot, whole: Tensor) -> None:
        materialise_whole(slot, whole, self.device)

    def attach(self) -> None:
        for slot in self.slots:
            if slot.spec.sizes:
                slot.parameter.data = slot.parameter.data.contiguous()
                start, size = even_chunk(slot.spec.sizes[0], self._parts, self._index)
                rows = slot.parameter.data.narrow(0, start, size)
                self._rows[slot.name] = in_place_of(slot.parameter, rows, in_graph=False)
        self.end()

    def mark_changed(self) -> None:
        self._stale = True

    def reduce_early(self, slots: Sequence[Slot]) -> None:
        if self.groups.gradient is not None:
            self._early.want([slot for slot in slots if slot.spec.sizes])

    def before_last_backward(self, slots: Sequence[Slot]) -> None:
        self._early.expect(slots)

    def after_last_backward(self, slots: Sequence[Slot]) -> None:
        self._early.complete(slots)

    def begin(self) -> None:
        if self._stale:
            self._gather()
        for slot in self.slots:
            slot.parameter.requires_grad_(self.optimizer_parameter(slot).requires_grad)
            slot.put(slot.parameter)
        self._set_aside = [slot.parameter.grad for slot in self.slots]  # of those without a dimension, which are not split
        for slot in self.slots:
            slot.parameter.grad = None
        self._early.begin()

    def end(self) -> None:
        for slot in self.slots:
            slot.put(self.optimizer_parameter(slot))

    def take(self) -> None:
        self._early.flush()
        self._fresh = [slot.parameter.grad for slot in self.slots]
        for slot, gradient in zip(self.slots, self._set_aside, strict=True):
            slot.parameter.grad = gradient
        self._set_aside = []

    def hand_over(self, scale: float) -> None:
        updated = [self.optimizer_parameter(slot) for slot in self.slots]
        for parameter, gradient in zip(updated, self._kept.set_aside([each.grad for each in updated]), strict=True):
            parameter.grad = gradient
        self._early.scale = scale
        self._window = accumulated(self._window, scaled(self._fresh, scale))
        self._fresh = []

    def reduce(self) -> None:
        chosen = [index for index, slot in enumerate(self.slots) if self.optimizer_parameter(slot).requires_grad]
        early = [self.slots[index] for index in chosen if self._early.covers(self.slots[index])]
        chosen = [index for index in chosen if not self._early.covers(self.slots[index])]
        slots = [self.slots[index] for index in chosen]
        gradients = sum_partial(slots, [self._window[index] for index in chosen], self.groups)
        self._window = [None] * len(self.slots)
        self._reduce_scalars(slots, gradients)
        rows = [index for index, slot in enumerate(slots) if slot.spec.sizes]
        if rows:
            presence = Presence([gradients[index] for index in rows], self.groups.gradient, self.device)
            absent = {rows[index] for index in presence.absent_everywhere()}
            for bucket in buckets([slots[index].parameter for index in rows]):
                self._reduce_bucket(slots, [rows[index] for index in bucket], gradients, absent)
        reduced = self._early.finish(early, self.groups.gradient, self.device)
        for slot, gradient in zip(early, reduced, strict=True):
            self._rows[slot.name].grad = gradient
        self._kept.add_to([self.optimizer_parameter(slot) for slot in self.slots])

    def _start(self, slots: list[Slot]) -> Finish:
        """Starts the reduce-scatter of a bucket and gives its whole gradients back."""
        parameters = [slot.parameter for slot in slots]
        layout = FlatLayout(tuple(tuple(each.shape) for each in parameters), self._parts)
        whole = [torch.zeros_like(each) if each.grad is None else each.grad for each in parameters]
        buffer = layout.pack(whole, self.reduce_dtype)
        for each in parameters:
            each.grad = None
        del whole
        block, work = reduce_scatter_started(buffer, self.groups.shard)

        def finish() -> list[Tensor]:
            if work is not None:
                work.wait()
            all_reduce_coalesced([block], self.groups.replicate)
            return layout.shards(block.to(parameters[0].dtype), self._index)

        return finish

    def _reduce_scalars(self, slots: list[Slot], gradients: list[Tensor | None]) -> None:
        """Parameters without a dimension are not sharded: their gradients are all-reduced."""
        chosen = [index for index, slot in enumerate(slots) if not slot.spec.sizes]
        summed = sum_over([slots[i] for i in chosen], [gradients[i] for i in chosen], self.groups.gradient, self.reduce_dtype)
        for index, gradient in zip(chosen, summed, strict=True):
            slots[index].parameter.grad = gradient

    def _reduce_bucket(self, slots: list[Slot], bucket: list[int], gradients: list[Tensor | None], absent: set[int]) -> None:
        parameters = [slots[index].parameter for index in bucket]
        layout = FlatLayout(tuple(tuple(each.shape) for each in parameters), self._parts)
        whole = [gradients[i] if gradients[i] is not None else torch.zeros_like(slots[i].parameter) for i in bucket]
        buffer = layout.pack([each for each in whole if each is not None], self.reduce_dtype)
        del whole
        if self._free_early:
            for index in bucket:
                gradients[index] = None
        block = reduce_scatter(buffer, self.groups.shard)
        all_reduce_coalesced([block], self.groups.replicate)
        block = block.to(parameters[0].dtype)
        for index, piece in zip(bucket, layout.shards(block, self._index), strict=True):
            self._rows[slots[index].name].grad = None if index in absent else piece

    def _gather(self) -> None:
        """Completes the whole parameters from every rank's rows."""
        self._stale = False
        if self.groups.shard is None:
            return
        slots = [slot for slot in self.slots if slot.spec.sizes]
        for bucket in buckets([slot.parameter for slot in slots]):
            parameters = [slots[index].parameter.data for index in bucket]
            layout = FlatLayout(tuple(tuple(each.shape) for each in parameters), self._parts)
            block = layout.pack_shards([self._rows[slots[index].name].data for index in bucket])
            layout.unpack(all_gather(block, self._parts, self.groups.shard), parameters)
