"""A rank of a world that is not there: a fake process group, a transport that moves nothing, and a meter of what they do."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from hybrid_strategy.parallel.transport import Message
from hybrid_strategy.parallel.trees import map_tensors, tensors_of


@contextmanager
def fake_world(rank: int, world_size: int) -> Iterator[None]:
    """This process as one rank of `world_size`; collectives return at once and change nothing."""
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


@dataclass
class Sent:
    """What a rank gave to collectives: (axis, collective) -> calls, and bytes of the whole tensor of all calls."""

    calls: Counter[tuple[str, str]] = field(default_factory=Counter)
    payload_bytes: Counter[tuple[str, str]] = field(default_factory=Counter)
    ignored: int = 0

    def add(self, axis: str, collective: str, num_bytes: int) -> None:
        """One call. All-reduces of up to `ignored` bytes only agree on which gradients there are."""
        if collective != "all_reduce" or num_bytes > self.ignored:
            self.calls[axis, collective] += 1
            self.payload_bytes[axis, collective] += num_bytes


_COLLECTIVES = {
    "allreduce_": "all_reduce",
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "_allgather_base_": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_out": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
}
"""Operator -> collective."""


TOGETHER = ("activations", "logits")
PASSING = "activations and logits"
"""Kinds that are never at their peaks at the same time, and what both together come to."""


class Meter(TorchDispatchMode):
    """Counts collectives, and the memory that is alive, by storage and by kind: the most there was of each at one time.

    Args:
        axis_of: name of a process group -> mesh axis.
        kind_of: kind of a new tensor.
    """

    def __init__(self, axis_of: Callable[[str], str], kind_of: Callable[[Tensor], str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sent, self._axis_of, self._kind_of = Sent(), axis_of, kind_of
        self._alive: dict[int, tuple[str, int]] = {}
        self._live: Counter[str] = Counter()
        self.most: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.__name__.partition(".")[0]
        if func.namespace in ("c10d", "_c10d_functional") and name in _COLLECTIVES:
            tensors = [each for _, each in tensors_of((args, result))]
            size = max(each.numel() * each.element_size() for each in tensors)
            self.sent.add(self._axis_of(_group_name(args, kwargs)), _COLLECTIVES[name], size)
        for _, tensor in tensors_of(result):
            if tensor.untyped_storage()._cdata not in self._alive:
                self.note(tensor, "copies" if self._is_cast(func, args) else self._kind_of(tensor))
        return result

    def _is_cast(self, func: Any, args: Any) -> bool:
        """Is it a parameter in another type, as autocast makes them?"""
        if func is not torch.ops.aten._to_copy.default:
            return False
        kind, _ = self._alive.get(args[0].untyped_storage()._cdata, ("", 0))
        return kind == "parameters"

    def note(self, tensor: Tensor, kind: str) -> None:
        """Counts the memory of a tensor as `kind` from now on, as long as it lives."""
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._alive:
            self._forget(key)
        else:
            weakref.finalize(storage, self._forget, key)
        self._alive[key] = kind, size
        self.add(kind, size)

    def add(self, kind: str, size: int) -> None:
        """More, or less, of a kind."""
        self._live[kind] += size
        self.most[kind] = max(self.most.get(kind, 0), self._live[kind])
        together = sum(self._live[each] for each in TOGETHER)
        self.most[PASSING] = max(self.most.get(PASSING, 0), together)

    def _forget(self, key: int) -> None:
        kind, size = self._alive.pop(key, ("", 0))
        self.add(kind, -size)


def _group_name(args: Any, kwargs: Any) -> str:
    """The group of a collective: a name in functional ones, an object in the others."""
    for each in (*args, *(kwargs or {}).values()):
        if isinstance(each, str) and each not in ("sum", "avg", "max", "min"):
            return each
        if isinstance(each, torch.ScriptObject) and "ProcessGroup" in str(each):
            return dist.ProcessGroup.unbox(each).group_name
    return ""


class FakeTransport:
    """Stands for `Transport`: counts what is sent, and makes empty tensors of what is received.

    Args:
        boundary: what crosses from one stage to the next, in shape: a nested value of tensors.
    """

    def __init__(self, sent: Sent, boundary: Any) -> None:
        self._sent, self._boundary = sent, boundary

    def checked(self, message: Message, value: Any) -> Any:
        return value

    def wanted(self, message: Message, value: Any) -> list[Any]:
        return [tensor for _, tensor in tensors_of(value) if tensor.requires_grad]

    def send(self, message: Message, value: Any) -> None:
        """Counts `value`."""
        for _, tensor in tensors_of(value):
            self._sent.add("pipeline_parallel", "send", tensor.numel() * tensor.element_size())

    def knows(self, message: Message) -> bool:
        return True

    def post(self, message: Message) -> None:
        """Nothing travels."""

    def receive(self, message: Message) -> Any:
        """Empty tensors of what crosses the boundary; in the backward pass of those that have gradients."""
        _, is_forward, *_ = cast("tuple[Any, ...]", message.key)  # stage, forward or not, ...: made by the player
        if not is_forward:
            return [torch.empty_like(each) for _, each in tensors_of(self._boundary) if each.is_floating_point()]
        return map_tensors(lambda _, each: torch.empty_like(each).requires_grad_(each.is_floating_point()), self._boundary)

    def finish(self) -> None:
        """Nothing travels."""
