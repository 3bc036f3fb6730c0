"""Ranks that hold the same weights must go on holding the same.

They start alike and get the same gradients, so they stay alike, bit for bit; but a hook may change weights or gradients by
numbers that it draws on each rank (a layer initialised again, noise), or on some ranks only. Each replica would train a model of
its own from there on. Some values of every weight are compared now and then.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from hybrid_strategy.distributed.groups import Groups
from hybrid_strategy.errors import ModelError, message
from hybrid_strategy.parallel.parameters import Slot
from hybrid_strategy.parallelize import Parallelized
from hybrid_strategy.strategy.cadence import Cadence

_LOOKED_AT = 4096
"""Values of a weight that are compared."""
_ROUNDING = 1e-3
"""Far above what different kernels of ranks could do, far below what other random numbers do."""


class Replicas:
    """Compares weights over the ranks that hold the same ones.

    Args:
        made: the parallelised module.
        groups: this rank's place.
        device: where the numbers are compared.
        cadence: when.

    Attributes:
        compares: whether anything is done.
    """

    def __init__(self, made: Parallelized, groups: Groups, device: torch.device, cadence: Cadence) -> None:
        self._made, self._groups, self._device, self._cadence = made, groups, device, cadence
        self.compares = True

    def check(self) -> None:
        """To be called by all ranks before each training step.

        Raises:
            ModelError: on every rank: weights that were the same are not any more.
        """
        if self._cadence.looks:
            refuse_hooks_on_rows(self._made)
        if not self.compares or not self._cadence.looks or self._groups.layout.world_size == 1:
            return
        apart = torch.zeros((), device=self._device)
        mine = None
        for slots, group in self._shared():
            index = self._first_apart(slots, group)
            if index is not None:
                mine = slots[index].name
                apart += 1
        dist.all_reduce(apart)
        if apart.item():
            self._refuse(mine)

    def _shared(self) -> list[tuple[list[Slot], dist.ProcessGroup]]:
        """Parameters, and the ranks that hold the same of them."""
        groups, slots = self._groups, self._made.slots
        whole = groups.layout.sharding == "ddp"
        parts = [
            ([slot for slot in slots if whole or not slot.spec.sizes], groups.gradient),
            ([slot for slot in slots if not whole and slot.spec.sizes], groups.replicate),
        ]
        for holders in sorted({slot.holders for slot in slots if slot.holders}):
            parts.append(([slot for slot in slots if slot.holders == holders], groups.among[holders]))
        return [(chosen, group) for chosen, group in parts if chosen and group is not None]

    def _first_apart(self, slots: Sequence[Slot], group: dist.ProcessGroup) -> int | None:
        held = [self._made.sharding.optimizer_parameter(slot).detach() for slot in slots]
        sums, sizes = torch.stack([_weighted(each) for each in held]).to(self._device).unbind(1)
        ends = torch.cat([sums, -sums, sizes])
        dist.all_reduce(ends, op=dist.ReduceOp.MAX, group=group)
        highest, lowest, size = ends.chunk(3)
        apart = (highest + lowest > _ROUNDING * size).nonzero()
        return int(apart[0]) if len(apart) else None

    def _refuse(self, mine: str | None) -> None:
        names: list[str | None] = [None] * self._groups.layout.world_size
        dist.all_gather_object(names, mine)
        name = next(each for each in names if each is not None)
        rule = "ranks that hold the same weights must change them alike, and they have other values now"
        numbers = f"Before step {self._cadence.steps} of this run it differs between ranks"
        advice = (
            "A hook that draws numbers for weights or gradients needs a generator with one seed for all ranks, e.g. "
            "torch.Generator().manual_seed(self.global_step); one that changes weights must do so on all ranks"
        )
        raise ModelError(message("module", name, rule, numbers, advice))


def refuse_hooks_on_rows(made: Parallelized) -> None:
    """Refuses hooks on gradients that nothing would call: autograd makes no gradients for the rows that optimizers hold.

    Raises:
        ModelError: a hook was registered after the module was taken apart.
    """
    for slot in made.slots:
        rows = made.sharding.optimizer_parameter(slot)
        if rows is not slot.parameter and (rows._backward_hooks or rows._post_accumulate_grad_hooks):
            rule = "under ZeRO modules show the rows that the optimizers hold, and a hook on their gradients is never called"
            advice = "Register it in __init__ or configure_model, or change gradients in on_before_optimizer_step"
            raise ModelError(message("register_hook", slot.name, rule, "It was registered after the module was set up", advice))


def _weighted(values: Tensor) -> Tensor:
    """A sum that tells values from others, and the size of what was added."""
    some = values.reshape(-1)[:_LOOKED_AT].double()
    weighted = torch.nan_to_num(some) * torch.arange(1, len(some) + 1, device=some.device)
    return torch.stack([weighted.sum(), weighted.abs().sum()])
