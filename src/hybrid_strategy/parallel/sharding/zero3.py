"""`zero3`: parameters are split too (arXiv:1910.02054, section 5.3). A unit is gathered just before it computes and given back
right after, in forward and again in backward; its gradient is reduce-scattered as soon as its backward is over (in the weight
pass where a schedule splits the backward pass; that half needs no weights).

Whole parameters are tensors without memory between uses: what autograd has saved of them is valid again once they are refilled.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hybrid_strategy.distributed.coalesced import all_reduce_coalesced
from hybrid_strategy.distributed.groups import Groups
from hybrid_strategy.errors import ModelError, message
from hybrid_strategy.parallel.outside import OutsideCalls
from hybrid_strategy.parallel.parameters import Slot, fill, in_place_of
from hybrid_strategy.parallel.past_layers import refuse_past_layers
from hybrid_strategy.parallel.second_order import refuse_second_order
from hybrid_strategy.parallel.sharding._base import (
    Kept,
    Presence,
    Sharding,
    accumulated,
    owned_once,
    scaled,
    sum_partial,
)
from hybrid_strategy.parallel.sharding._flat import FlatLayout, all_gather, reduce_scatter
from hybrid_strategy.parallel.trees import iterate_tensors
from hybrid_strategy.parallel.valueless import lose, regain
from hybrid_strategy.parallel.wrapping import Wrapped
from hybrid_strategy.spec.shard import even_chunk


class _Unit:
    """Parameters that are gathered together."""

    def __init__(
        self, slots: list[Slot], rows: dict[str, nn.Parameter], groups: Groups, leave: Callable[[_Unit, Slot], None]
    ) -> None:
        self._rows, self._groups, self._leave = rows, groups, leave
        self._parts, self._index = groups.layout.state_shards, groups.state_shard
        self.resident = False
        self.have(slots)

    def have(self, slots: list[Slot]) -> None:
        """Its parameters from now on."""
        self.slots = slots
        self._layout = FlatLayout(tuple(slot.spec.sizes for slot in slots), self._parts)
        if not self.resident:
            self._lose()

    def _lose(self) -> None:
        for slot in self.slots:
            slot.parameter.untyped_storage().resize_(0)
            lose(slot.parameter, partial(self._leave, self, slot))

    def gather(self) -> None:
        if self.resident or not self.slots:
            return
        self.resident = True
        tensors = []
        for slot in self.slots:
            regain(slot.parameter)
            slot.parameter.untyped_storage().resize_(slot.parameter.numel() * slot.parameter.element_size())
            tensors.append(slot.parameter.data)
        block = self._layout.pack_shards([self._rows[slot.name].data for slot in self.slots])
        group = self._groups.shard
        buffer = block.unsqueeze(0) if group is None else all_gather(block, self._parts, group)
        self._layout.unpack(buffer, tensors)

    def free(self) -> None:
        if self.resident:
            self.resident = False
            self._lose()

    def scatter_gradients(self, dtype: torch.dtype | None) -> dict[str, Tensor]:
        """Reduce-scatters the whole gradients of one backward pass, as `dtype`; rows of the parameters that take part."""
        slots = [slot for slot in self.slots if self._rows[slot.name].requires_grad]
        if not slots:
            return {}
        whole = [
            torch.zeros(slot.spec.sizes, dtype=slot.parameter.dtype, device=slot.parameter.device)
            if slot.parameter.grad is None
            else slot.parameter.grad
            for slot in slots
        ]
        for slot in slots:
            slot.parameter.grad = None
        layout = FlatLayout(tuple(slot.spec.sizes for slot in slots), self._parts)
        buffer = layout.pack(whole, dtype)
        block = reduce_scatter(buffer, self._groups.shard).to(whole[0].dtype)
        return {slot.name: piece for slot, piece in zip(slots, layout.shards(block, self._index), strict=True)}


class UnitSharding(Sharding):
    """Every parameter is split by rows (dimension 0); `units` are the modules gathered together, the rest is one more unit."""

    def __init__(self, slots: Sequence[Slot], groups: Groups, device: torch.device, units: Sequence[nn.Module]) -> None:
        super().__init__(slots, groups, device)
        self._modules = list(units)
        self._rows: dict[str, nn.Parameter] = {}
        self._fresh_rows: dict[str, Tensor] = {}
        self._touched: set[str] = set()
        self._window: list[Tensor | None] = []
        self._kept = Kept()
        self._backward_unit: _Unit | None = None
        self._is_first_half = False
        self._incomplete: Counter[_Unit] = Counter()
        self._weight_unit: _Unit | None = None
        self._completed: set[_Unit] = set()
        self._active = False
        self._outside = OutsideCalls()
        for slot in self.slots:
            self._narrow(slot)

    def _narrow(self, slot: Slot) -> None:
        if slot.spec.sizes:
            start, size = even_chunk(slot.spec.sizes[0], self.groups.layout.state_shards, self.groups.state_shard)
            slot.narrow_spec(start, size, slot.spec.owner and self.groups.coordinate.data_parallel_replicate == 0)
        else:
            owned_once(slot, self.groups.is_first_replica)

    def optimizer_parameter(self, slot: Slot) -> nn.Parameter:
        return self._rows.get(slot.name, slot.parameter)

    def materialise(self, slot: Slot, whole: Tensor) -> None:
        rows = torch.empty(slot.shard_spec.sizes, dtype=whole.dtype, device=self.device)
        fill(rows, whole, slot.shard_spec)
        self._hold_rows(slot, rows)

    def _hold_rows(self, slot: Slot, rows: Tensor) -> None:
        """Keeps `rows` for the optimizer; the whole parameter becomes a tensor without memory."""
        if not slot.spec.sizes:
            slot.parameter = in_place_of(slot.parameter, rows)
            return
        self._rows[slot.name] = in_place_of(slot.parameter, rows, in_graph=False)
        slot.parameter = in_place_of(slot.parameter, torch.empty(slot.spec.sizes, dtype=rows.dtype, device=self.device))
        slot.parameter.untyped_storage().resize_(0)

    def attach(self) -> None:
        for slot in self.slots:
            if slot.spec.sizes and slot.name not in self._rows:
                start, size = even_chunk(slot.spec.sizes[0], self.groups.layout.state_shards, self.groups.state_shard)
                self._hold_rows(slot, slot.parameter.data.narrow(0, start, size).clone())
        self._units = self._make_units()
        self._home = {id(slot.parameter): unit for unit in self._units[:-1] for slot in unit.slots}
        self.end()

    def _make_units(self) -> list[_Unit]:
        """Units in the order of the modules; what belongs to none comes last and stays gathered during a step."""
        rest = {slot.name: slot for slot in self.slots if slot.spec.sizes}
        units = []
        for module in self._modules:
            inside = {id(each) for each in module.modules()}
            slots = [slot for slot in rest.values() if id(slot.places[0][0]) in inside and len(slot.places) == 1]
            for slot in slots:
                del rest[slot.name]
            unit = _Unit(slots, self._rows, self.groups, self._leave)
            module.forward = self._around(unit, module.forward)
            units.append(unit)
        return [*units, _Unit(list(rest.values()), self._rows, self.groups, self._leave)]

    def _leave(self, unit: _Unit, slot: Slot) -> None:
        """A step uses a parameter outside of its unit (tied by hand, a norm of weights): it now stays gathered during a step."""
        refuse_past_layers(slot)
        rest = self._units[-1]
        alone = _Unit([slot], self._rows, self.groups, self._leave)
        alone.gather()
        unit.have([each for each in unit.slots if each is not slot])
        rest.resident = True
        rest.have([*rest.slots, slot])
        self._home.pop(id(slot.parameter), None)

    def cover(self, root: nn.Module, outside: OutsideCalls) -> None:
        self._outside = outside
        root.forward = self._outside_of_steps(root.forward)

    def _outside_of_steps(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """A hook may call the model or a layer, on all ranks: whole parameters are there meanwhile."""

        def gathered(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if self._active or self.groups.shard is None:
                return forward(*args, **kwargs)
            if torch.is_grad_enabled():
                rule = "zero3 holds whole weights for the time of a call only, too short for a backward pass"
                advice = "Call it under torch.no_grad(), or compute the loss in training_step"
                raise ModelError(message("module", "a layer", rule, "It was called outside of a step with gradients", advice))
            with self._outside.call():
                self.begin()
                try:
                    return forward(*args, **kwargs)
                finally:
                    self.end()
                    self.put_back()

        return Wrapped(forward, gathered, _refuse_copies if self.groups.shard is not None else None)

    def _around(self, unit: _Unit, forward: Callable[..., Any]) -> Callable[..., Any]:
        def gathered_forward(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if not self._active:
                return forward(*args, **kwargs)
            unit.gather()
            output = forward(*args, **kwargs)
            if self._backward_unit is not unit:
                unit.free()
            given = {id(tensor) for tensor in iterate_tensors((args, kwargs))}
            for tensor in iterate_tensors(output):
                # what a unit hands on as it came is no output of its own: its gradient is complete long after
                if tensor.requires_grad and id(tensor) not in given:
                    tensor.register_hook(lambda _: self._enter_backward(unit))
            return output

        return self._outside_of_steps(Wrapped(forward, gathered_forward))

    def _enter_backward(self, unit: _Unit) -> None:
        """Called when the gradient of a unit's output is there: the unit after it is done, this one is needed."""
        refuse_second_order(
            "zero3 gives weights back as soon as a backward pass is done with them, and a gradient of gradients needs them again",
            "Set sharding to zero2",
        )
        if self._backward_unit is not unit:
            self._finish_backward()
            self._backward_unit = unit
        unit.gather()

    def _finish_backward(self) -> None:
        unit, self._backward_unit = self._backward_unit, None
        if unit is not None:
            if self._is_first_half:
                self._incomplete[unit] += 1
            else:
                self._scatter(unit)
            unit.free()

    @contextmanager
    def first_half(self) -> Iterator[None]:
        self._is_first_half = True
        try:
            yield
            self._finish_backward()
        finally:
            self._is_first_half = False

    def _scatter(self, unit: _Unit) -> None:
        self._touched.update(slot.name for slot in unit.slots if slot.parameter.grad is not None)
        for name, piece in unit.scatter_gradients(self.reduce_dtype).items():
            if name in self._fresh_rows:
                self._fresh_rows[name].add_(piece)
            else:
                self._fresh_rows[name] = piece

    def after_backward(self, slots: Sequence[Slot]) -> None:
        self._finish_backward()
        own = {id(slot) for slot in slots}
        for unit in self._units:
            if any(id(slot) in own for slot in unit.slots):
                self._complete(unit)
        self._weight_unit, self._completed = None, set()

    def before_weight(self, weight: nn.Parameter) -> None:
        """The weights of a unit come one after another: the first of the next says that this one is complete."""
        unit = self._home.get(id(weight))
        if unit is not self._weight_unit:
            if self._weight_unit is not None:
                self._complete(self._weight_unit)
            self._weight_unit = unit

    def _complete(self, unit: _Unit) -> None:
        """Reduces the gradient that a unit has had since its first half, once a weight pass."""
        if self._incomplete[unit] and unit not in self._completed:
            self._completed.add(unit)
            self._incomplete[unit] -= 1
            self._scatter(unit)

    def begin(self) -> None:
        self._active = True
        self._window = [self.optimizer_parameter(slot).grad for slot in self.slots]
        for slot in self.slots:
            parameter = self.optimizer_parameter(slot)
            parameter.grad = None
            slot.parameter.requires_grad_(parameter.requires_grad)
            slot.put(slot.parameter)
        self._units[-1].gather()

    def end(self) -> None:
        self._active = False
        for unit in self._units:
            unit.free()
        for slot in self.slots:
            slot.put(self.optimizer_parameter(slot))

    def take(self) -> None:
        self._scatter(self._units[-1])
        self._fresh = [self._fresh_rows.get(slot.name, None if slot.spec.sizes else slot.parameter.grad) for slot in self.slots]
        self._fresh_rows = {}
        self.put_back()

    def put_back(self) -> None:
        for slot, gradient in zip(self.slots, self._window, strict=True):
            self.optimizer_parameter(slot).grad = gradient
        self._window = []

    def hand_over(self, scale: float) -> None:
        window = self._kept.set_aside([self.optimizer_parameter(slot).grad for slot in self.slots])
        for slot, gradient in zip(self.slots, accumulated(window, scaled(self._fresh, scale)), strict=True):
            self.optimizer_parameter(slot).grad = gradient
        self._fresh = []

    def reduce(self) -> None:
        slots = self.trainable
        marks = [slot.parameter if slot.name in self._touched or not slot.spec.sizes else None for slot in slots]
        presence = Presence(marks, self.groups.gradient, self.device)
        gradients = sum_partial(slots, [self.optimizer_parameter(slot).grad for slot in slots], self.groups)
        present = [(slot, gradient) for slot, gradient in zip(slots, gradients, strict=True) if gradient is not None]
        dtype = self.reduce_dtype
        all_reduce_coalesced([gradient for slot, gradient in present if slot.spec.sizes], self.groups.replicate, dtype)
        all_reduce_coalesced([gradient for slot, gradient in present if not slot.spec.sizes], self.groups.gradient, dtype)
        absent = presence.absent_everywhere()
        for index, (slot, gradient) in enumerate(zip(slots, gradients, strict=True)):
            self.optimizer_parameter(slot).grad = None if index in absent else gradient
        self._touched = set()
        self._kept.add_to([self.optimizer_parameter(slot) for slot in self.slots])


def _refuse_copies(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    rule = "a copy of a layer has this rank's rows of its weights only"
    advice = "Copy it before the Trainer does (in configure_model or __init__), or set sharding to ddp"
    raise ModelError(message("module", "a copy", rule, "It was called", advice))


class Part:
    """The registered part."""

    name = "zero3"

    @staticmethod
    def create(slots: Sequence[Slot], groups: Groups, device: torch.device, units: Sequence[nn.Module] = ()) -> Sharding:
        return UnitSharding(slots, groups, device, units)


PART = Part()
