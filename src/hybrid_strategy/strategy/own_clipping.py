"""`torch.nn.utils.clip_grad_norm_` and `get_total_norm` in a user's own code: the norm is that of the whole model's gradients.

A hook that clips by itself hands over the gradients that it finds, which are this rank's pieces where weights are split. Each
rank would scale its pieces by another factor, and nobody would notice. So while a Trainer runs, the norm that torch's function
takes is that over all ranks wherever it is given gradients of the module. The only file that touches torch's private name (2.13).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad

from hybrid_strategy.distributed.gradient_norm import total_norm
from hybrid_strategy.distributed.groups import Groups
from hybrid_strategy.errors import ModelError, message
from hybrid_strategy.parallelize import Parallelized

_NAME = "_get_total_norm"
_of_torch = getattr(clip_grad, _NAME)


class OwnClipping:
    """Takes the place of torch's norm of gradients between `start` and `stop`, in layouts that split weights.

    Args:
        made: the parallelised module.
        groups: this rank's place.
        device: where the norm is added up.
    """

    def __init__(self, made: Parallelized, groups: Groups, device: torch.device) -> None:
        self._made, self._device, self._layout = made, device, groups.layout

    def start(self) -> None:
        layout = self._layout
        if max(layout.pipeline_parallel_size, layout.tensor_parallel_size, layout.state_shards) > 1:
            self._put(self._norm)

    def stop(self) -> None:
        self._put(_of_torch)

    def _put(self, norm: Callable[..., Tensor]) -> None:
        setattr(clip_grad, _NAME, norm)  # where clip_grad_norm_ looks
        vars(nn.utils)["get_total_norm"] = norm

    def _norm(self, tensors: Tensor | Iterable[Tensor], norm_type: float = 2.0, *options: Any, **named: Any) -> Tensor:
        """What torch calls, with its arguments. Where gradients of the module are among `tensors`, a collective of all ranks."""
        given = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        held = {id(each.grad): slot for slot, each in self._parameters() if each.grad is not None}
        if not any(id(each) in held for each in given) and (given or not self._may_hold_none(bool(held))):
            return _of_torch(given, norm_type, *options, **named)  # type: ignore[no-any-return]
        owned = [each for each in given if id(each) not in held or held[id(each)].shard_spec.owner]
        norm = total_norm([each for each in owned if each.numel()], float(norm_type), self._device)
        if (options[0] if options else named.get("error_if_nonfinite", False)) and not math.isfinite(norm.item()):
            raise RuntimeError(f"The total norm of order {norm_type} for gradients from `parameters` is non-finite")
        return norm.to(given[0].dtype) if given else norm.float()

    def _parameters(self) -> list[tuple[Any, Any]]:
        return [(slot, self._made.sharding.optimizer_parameter(slot)) for slot in self._made.slots]

    def _may_hold_none(self, holds_gradients: bool) -> bool:
        """No gradients are given: in a pipeline they are on other ranks.

        Raises:
            ModelError: they are here, but not on the parameters that the caller sees.
        """
        if self._layout.pipeline_parallel_size > 1:
            return True
        if holds_gradients and self._layout.state_shards > 1:
            rule = "while a step with manual optimization runs, gradients lie with the rows that the optimizers hold"
            advice = "Call self.clip_gradients(optimizer, gradient_clip_val=..., gradient_clip_algorithm='norm')"
            raise ModelError(message("clip_grad_norm_", "given no gradients", rule, "", advice))
        return False
