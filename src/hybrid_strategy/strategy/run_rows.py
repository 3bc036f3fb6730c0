"""How many samples a step has on other data-parallel ranks, where the loader does not know it: the ranks ask each other."""

from __future__ import annotations

import torch
import torch.distributed as dist

from hybrid_strategy.distributed.groups import Groups
from hybrid_strategy.strategy.step_call import StepCall


class RunRows:
    """Counts samples over the data-parallel ranks.

    Args:
        groups: this rank's place.
        device: where they are added up.
    """

    def __init__(self, groups: Groups, device: torch.device) -> None:
        self._groups, self._device = groups, device

    def most(self, call: StepCall, rows: int) -> int:
        """Samples of the rank that has most of this step; collective where that is not known.

        Args:
            rows: of this rank's batch.
        """
        if call.run_rows is not None:
            return -(-call.run_rows // self._groups.layout.data_parallel_size)
        return int(self._over_ranks(rows, dist.ReduceOp.MAX))

    def all(self, call: StepCall, rows: int) -> float:
        """Samples of this step on all ranks: the loss is the mean over them, so every rank must know it first.

        Args:
            rows: samples that count on this rank.
        """
        if call.run_rows is not None:
            return float(max(call.run_rows, 1))
        return max(float(rows) if self._groups.data is None else self._over_ranks(rows, dist.ReduceOp.SUM), 1.0)

    def _over_ranks(self, rows: int, operation: dist.ReduceOp.RedOpType) -> float:
        number = torch.tensor([float(rows)], dtype=torch.float64, device=self._device)
        dist.all_reduce(number, op=operation, group=self._groups.data)
        return number.item()
