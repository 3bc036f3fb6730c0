"""Moves nested tensors between pipeline ranks.

The shapes of a message depend on the micro-batch, and both ends know the micro-batch. So shapes travel once for each kind of
micro-batch (its `signature`), and from then on only the tensors do. Sends are asynchronous. Receives from one rank are posted
in the order in which that rank sends, which is what a backend without tags (NCCL) matches them by.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybrid_strategy.distributed.groups import Groups
from hybrid_strategy.errors import ModelError
from hybrid_strategy.errors import message as _message
from hybrid_strategy.parallel.past_layers import raise_it
from hybrid_strategy.parallel.stage_now import Crossing
from hybrid_strategy.parallel.structures import Leaf, holder_of_tensors, looks_of, map_leaves, structure_of
from hybrid_strategy.parallel.trees import tensors_of

_HEADER_TAG = 1 << 28


@dataclass(frozen=True)
class Message:
    """One message: who sends it, its number in the step, and the key under which its shapes are remembered."""

    source: int
    destination: int
    tag: int
    key: Hashable


class _Incoming:
    """A message being received: the buffers and the transfers that fill them."""

    def __init__(self, structure: Any) -> None:
        self.structure = structure
        self.buffers: list[Tensor] = []
        self.works: list[dist.Work] = []


class Transport:
    """Sends and receives nested tensors along the pipeline axis; ranks are pipeline ranks."""

    def __init__(self, groups: Groups, device: torch.device, refuse: Callable[[ModelError], None] = raise_it) -> None:
        self.rank = groups.coordinate.pipeline_parallel
        self._groups, self._device, self._refuse = groups, device, refuse
        self._sent: dict[Hashable, Any] = {}
        self._structures: dict[Hashable, Any] = {}
        self._sends: list[tuple[dist.Work, Tensor]] = []
        self._posted: dict[tuple[int, int], _Incoming] = {}

    def checked(self, message: Message, value: Any) -> Any:
        """`value`; or nothing, as of a stage that has failed, where the other end waits for other looks: that is refused."""
        if not isinstance(value, Crossing) or value.failed:
            return value
        if message.key not in self._sent:
            kind = holder_of_tensors((value.output, value.carried))
            if kind is None:
                return value
            self._refuse(_hidden(kind))
            return Crossing.nothing(failed=True)
        before, now = looks_of(self._sent[message.key]), looks_of(structure_of(value))
        if before == now:
            return value
        was, became = next(((a, b) for a, b in zip(before, now, strict=False) if a != b), (len(before), len(now)))
        self._refuse(_changed(was, became))
        return Crossing.nothing(failed=True)

    def wanted(self, message: Message, value: Any) -> list[Tensor]:
        """Tensors of `value` of which the other end sends gradients back, as it was told with the first such message."""
        told: list[bool] = []
        map_leaves(self._sent[message.key], lambda leaf: told.append(leaf.requires_grad))
        return [tensor for (_, tensor), wants in zip(tensors_of(value), told, strict=False) if wants]

    def send(self, message: Message, value: Any) -> None:
        """Starts sending `value` (a nested value of tensors).

        Of a stage that has failed zeros go out where the other end waits for what it was told of before.
        """
        if message.key not in self._sent:
            self._sent[message.key] = structure_of(value)
            self._send_structure(message, self._sent[message.key])
        elif isinstance(value, Crossing) and value.failed:
            value = map_leaves(
                self._sent[message.key], lambda leaf: torch.zeros(leaf.shape, dtype=leaf.dtype, device=self._device)
            )
        tensors = [tensor for _, tensor in tensors_of(value)]
        group = self._data_group(message)
        for index, tensor in enumerate(tensors):
            data = _real(tensor.detach().contiguous())
            work = dist.isend(data, group=group, group_dst=message.destination, tag=message.tag * 64 + index)
            if work is not None:
                self._sends.append((work, data))
        self._sends = [(work, data) for work, data in self._sends if not work.is_completed()]

    def forget(self) -> None:
        """Lets shapes, and which tensors want a gradient, travel again with the next message of each kind."""
        self._sent.clear()
        self._structures.clear()

    def knows(self, message: Message) -> bool:
        """Are the shapes of such a message known, so that posting it does not wait?"""
        return message.key in self._structures

    def post(self, message: Message) -> None:
        """Starts receiving. Waits for the shapes where they are not known yet."""
        if message.key not in self._structures:
            self._structures[message.key] = self._receive_structure(message)
        self._posted[message.source, message.tag] = self._start(message)

    def receive(self, message: Message) -> Any:
        """Waits for a posted message and returns it; what required a gradient at the sender does so here, as leaves."""
        incoming = self._posted.pop((message.source, message.tag))
        for work in incoming.works:
            work.wait()
        buffers = iter(incoming.buffers)
        return map_leaves(incoming.structure, lambda leaf: next(buffers).requires_grad_(leaf.requires_grad))

    def finish(self) -> None:
        """Waits until everything that was sent has left."""
        for work, _ in self._sends:
            work.wait()
        self._sends.clear()

    def _start(self, message: Message) -> _Incoming:
        incoming = _Incoming(self._structures[message.key])
        group = self._data_group(message)

        def begin(leaf: Leaf) -> None:
            buffer = torch.empty(leaf.shape, dtype=leaf.dtype, device=self._device)
            tag = message.tag * 64 + len(incoming.buffers)
            work = dist.irecv(_real(buffer), group=group, group_src=message.source, tag=tag)
            incoming.buffers.append(buffer)
            if work is not None:
                incoming.works.append(work)

        map_leaves(incoming.structure, begin)
        return incoming

    def _data_group(self, message: Message) -> dist.ProcessGroup | None:
        return self._groups.upward if message.destination > message.source else self._groups.downward

    def _send_structure(self, message: Message, structure: Any) -> None:
        payload = torch.frombuffer(bytearray(pickle.dumps(structure)), dtype=torch.uint8)
        length = torch.tensor([payload.numel()], dtype=torch.int64)
        for part, tensor in enumerate((length, payload)):
            tag = _HEADER_TAG + message.tag * 2 + part
            work = dist.isend(tensor, group=self._groups.control, group_dst=message.destination, tag=tag)
            if work is not None:
                self._sends.append((work, tensor))

    def _receive_structure(self, message: Message) -> Any:
        length = torch.zeros(1, dtype=torch.int64)
        dist.recv(length, group=self._groups.control, group_src=message.source, tag=_HEADER_TAG + message.tag * 2)
        payload = torch.empty(int(length.item()), dtype=torch.uint8)
        dist.recv(payload, group=self._groups.control, group_src=message.source, tag=_HEADER_TAG + message.tag * 2 + 1)
        return pickle.loads(payload.numpy().tobytes())


def _real(tensor: Tensor) -> Tensor:
    """The numbers of a complex tensor: not every backend knows more."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _changed(was: Any, became: Any) -> ModelError:
    rule = "what a stage hands on must look the same for all micro-batches of one shape: of it only the tensors travel each time"
    advice = "Hand numbers on as tensors, and tensors of one shape, or set pipeline_parallel_size=1"
    return ModelError(_message("module", "the pipeline's model", rule, f"Of it {was} has become {became}", advice))


def _hidden(kind: type) -> ModelError:
    rule = "units hand on an object of which the pipeline cannot see the tensors, so they would not be sent"
    advice = "Make it a dataclass, a dict, a list or a tuple"
    return ModelError(_message("module", "the pipeline's model", rule, f"It is a {kind.__module__}.{kind.__qualname__}", advice))
