"""What a step returned on the last stage, on every pipeline rank: hooks and callbacks read it there."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybrid_strategy.errors import ConfigError, message
from hybrid_strategy.parallel.trees import map_tensors, tensors_of
from hybrid_strategy.units import format_bytes

_log = logging.getLogger(__name__)
_LARGE_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Skeleton:
    """A nested value without its tensors' values, as bytes; or why it cannot be sent."""

    content: bytes = b""
    trouble: str = ""

    def value(self) -> Any:
        """The nested value with tensors on the meta device."""
        return pickle.loads(self.content)


def skeleton_of(outputs: Any) -> Skeleton:
    """The skeleton of what a step returned."""
    bare = map_tensors(lambda _, tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"), outputs)
    try:
        return Skeleton(pickle.dumps(bare))
    except Exception as error:  # whatever a user's object raises when it is pickled: all ranks must hear of it
        return Skeleton(trouble=f"{type(error).__name__}: {error}")


class OutputSharing:
    """Sends the tensors of outputs from the last stage to the other pipeline ranks of the same data-parallel coordinate."""

    def __init__(self, group: dist.ProcessGroup, source: int, is_source: bool, device: torch.device) -> None:
        self._group, self._source, self._is_source, self._device = group, source, is_source, device
        self._warned = False

    def share(self, step: str, outputs: Any, skeleton: Skeleton) -> Any:
        """The outputs, on every rank; a collective call.

        Raises:
            ConfigError: on every rank, where the outputs hold an object that cannot be pickled.
        """
        if skeleton.trouble:
            rule = "every pipeline rank gets what the step returned, so it must be possible to pickle it"
            raise ConfigError(
                message(f"the output of {step}", "an object", rule, skeleton.trouble, "Return tensors and plain data")
            )
        if self._is_source:
            self._send(step, [tensor for _, tensor in tensors_of(outputs)])
            return outputs
        return map_tensors(lambda _, bare: self._receive(bare), skeleton.value())

    def _send(self, step: str, tensors: Sequence[Tensor]) -> None:
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        if size > _LARGE_BYTES and not self._warned:
            self._warned = True
            _log.warning("%s returns %s, sent to every pipeline rank; return only what hooks read", step, format_bytes(size))
        for tensor in tensors:
            dist.broadcast(tensor.detach().to(self._device).contiguous(), group_src=self._source, group=self._group)

    def _receive(self, bare: Tensor) -> Tensor:
        buffer = torch.empty(bare.shape, dtype=bare.dtype, device=self._device)
        dist.broadcast(buffer, group_src=self._source, group=self._group)
        return buffer
