"""Ranks that share samples must have the same ones, and ranks that share every layer must come to the same loss from them.

Both are asked at the first batch of a run. Samples differ where every process makes its own data without a seed: a pipeline would
then pair one rank's inputs with another's labels. Losses differ where a step reads weights past the layers (a norm in the loss:
each rank has a piece), or draws numbers from a generator that is not torch's: each rank would then train another model.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybrid_strategy.distributed.groups import Groups
from hybrid_strategy.errors import DataError, ModelError, message
from hybrid_strategy.parallel.trees import Path, tensors_of

_ROUNDING = 1e-5
"""Sums over ranks end in the same bits on all of them, so this is room enough for kernels that add in any order."""


_LOOKED_AT = 4096
"""Values of a tensor that are compared."""


class Peers:
    """Compares samples over tensor-, context- and pipeline-parallel ranks, and the loss over tensor-parallel ones.

    Args:
        groups: this rank's place.
        device: where the loss is compared.
    """

    def __init__(self, groups: Groups, device: torch.device) -> None:
        self._groups, self._device = groups, device
        self._asked = False
        self._seen: set[str] = set()

    def restart(self) -> None:
        """The next batch is the first of a run."""
        self._asked = False
        self._seen.clear()

    def check_samples(self, stage: str, batch: Any) -> None:
        """Compares the first batch of a stage (`train`, `validate`, ...); a collective of all ranks.

        Raises:
            DataError: on every rank: ranks that must see the same samples do not.
        """
        layout = self._groups.layout
        if stage in self._seen or layout.world_size == layout.data_parallel_size:
            return
        self._seen.add(stage)
        found: list[Any] = [None] * layout.world_size
        dist.all_gather_object(found, [_fingerprint(*each) for each in tensors_of(batch)])
        first: dict[int, int] = {}
        for rank, prints in enumerate(found):
            peer = first.setdefault(layout.coordinate(rank).data_parallel, rank)
            if prints != found[peer]:
                rule = "ranks that share a model read the same data, as every process makes it, and these differ"
                numbers = f"The first batch to {stage} is another on rank {rank} than on rank {peer}"
                advice = "Call seed_everything before the data is made, or give its generator a seed"
                raise DataError(message("dataset", "another on every rank", rule, numbers, advice))

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


def _fingerprint(path: Path, tensor: Tensor) -> tuple[Any, ...]:
    """Tells a tensor from others, by some of its values; NaN is like itself."""
    about = (path, tuple(tensor.shape), str(tensor.dtype))
    if tensor.layout is not torch.strided or tensor.is_complex() or tensor.is_meta:
        return about
    some = tensor.detach().reshape(-1)[:_LOOKED_AT].double()
    return (*about, repr((some * torch.arange(1, len(some) + 1, device=some.device)).sum().item()))
