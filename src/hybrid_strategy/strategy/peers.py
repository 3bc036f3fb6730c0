"""Ranks that share every layer see the same samples, so they must come to the same loss: asked in the first step of a run.

They do not where a step reads weights past the layers (a norm in the loss: each rank has a piece), or draws numbers from a
generator that is not torch's; each rank would then train another model.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from hybrid_strategy.distributed.groups import Groups
from hybrid_strategy.errors import ModelError, message

_ROUNDING = 1e-5
"""Sums over ranks end in the same bits on all of them, so this is room enough for kernels that add in any order."""


class TensorPeers:
    """Compares the loss of tensor-parallel ranks.

    Args:
        groups: this rank's place.
        device: where the loss is compared.
    """

    def __init__(self, groups: Groups, device: torch.device) -> None:
        self._groups, self._device = groups, device
        self._asked = False

    def restart(self) -> None:
        """The next step is the first of a run."""
        self._asked = False

    def apart(self, loss: Tensor) -> Tensor:
        """1 where the ranks of this group differ in the first step, else 0; a collective of ranks that hold the last stage."""
        no = torch.zeros((), dtype=torch.float64, device=self._device)
        if self._groups.tensor is None or self._asked:
            return no
        ends = torch.nan_to_num(torch.stack([loss, -loss])).to(self._device)
        dist.all_reduce(ends, op=dist.ReduceOp.MAX, group=self._groups.tensor)
        return (ends.sum() > _ROUNDING * ends.abs().max()).to(no)

    def check(self, apart: float) -> None:
        """Called on all ranks with the sum of what `apart` gave.

        Raises:
            ModelError: the losses differ.
        """
        self._asked = True
        if apart:
            rule = "ranks that share every layer must come to the same loss for the same samples"
            numbers = (
                "It differs between them: the step reads weights past their layers (each rank has a piece), or draws by itself"
            )
            advice = (
                "Use weight_decay of the optimizer instead of a norm in the loss, draw with torch, or set tensor_parallel_size=1"
            )
            raise ModelError(message("training_step", "its loss", rule, numbers, advice))
