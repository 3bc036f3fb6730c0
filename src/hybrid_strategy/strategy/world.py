"""The part of the strategy that knows processes and devices only: ranks, and collectives over the whole world."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.strategies.parallel import ParallelStrategy
from torch import Tensor

from hybrid_strategy.distributed.groups import Groups
from hybrid_strategy.errors import DataError, message
from hybrid_strategy.strategy import _lightning
from hybrid_strategy.strategy.slurm_world import judged

_MOST_DIMS = 8
"""Dimensions that are compared."""


class WorldStrategy(ParallelStrategy):
    """Ranks, devices, barrier, broadcast and reduce over all processes of a run."""

    num_nodes: int = 1
    _groups: Groups | None = None

    @property
    def groups(self) -> Groups:
        """This rank's place and process groups, known once the processes have been joined."""
        if self._groups is None:
            raise RuntimeError("the process groups are made in setup_environment, which has not run yet")
        return self._groups

    @property
    def root_device(self) -> torch.device:
        devices = self.parallel_devices or [torch.device("cpu")]
        return devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        return len(self.parallel_devices) if self.parallel_devices else 1

    @property
    def is_distributed(self) -> bool:
        """Tells Lightning that `sync_dist` means something."""
        return self.num_nodes * self.num_processes > 1

    def set_world_ranks(self) -> None:
        self.cluster_environment = judged(self.cluster_environment, self.num_nodes, self.num_processes)
        environment = self.cluster_environment
        if environment is not None:
            environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            environment.set_world_size(self.num_nodes * self.num_processes)
        _lightning.set_rank_zero(self.global_rank)

    def barrier(self, name: str | None = None) -> None:
        if not _lightning.distributed_is_initialized():
            return
        if dist.get_backend() == "nccl":
            dist.barrier(device_ids=[self.root_device.index])
        else:
            dist.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        if not _lightning.distributed_is_initialized() or self.world_size == 1:
            return obj
        box = [obj]
        dist.broadcast_object_list(box, src)
        return box[0]

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduces over the whole world; the mean is right for values that replicas share."""
        return _lightning.sync_tensor(tensor, group, reduce_op) if isinstance(tensor, Tensor) else tensor

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """The tensors of the data-parallel ranks, one after another along a new first dimension.

        Other ranks bring the same again, and in a step of a pipeline they do not come to this call. As it is with one device,
        nothing is added where nobody reads other samples.

        Raises:
            DataError: on every rank: their tensors are of other shapes, as those of an uneven last batch are.
        """
        among = self.groups.data if group is None or group is dist.group.WORLD else group
        if among is None:
            return tensor
        _refuse_other_shapes(tensor, among)
        return super().all_gather(tensor, group=among, sync_grads=sync_grads)

    def _user_module(self) -> pl.LightningModule:
        module = self.lightning_module
        if module is None:
            raise RuntimeError("no LightningModule is connected to the strategy")
        return module


def _refuse_other_shapes(tensor: Tensor, group: dist.ProcessGroup) -> None:
    """The backends would wait, fail or mix values."""
    mine = torch.tensor([tensor.dim(), *tensor.shape, *(0,) * _MOST_DIMS][: _MOST_DIMS + 1], device=tensor.device)
    found = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(found, mine, group=group)
    shapes = [tuple(each[1 : 1 + each[0]]) for each in torch.stack(found).tolist()]
    if len(set(shapes)) > 1:
        rule = "ranks can gather tensors of one shape only, and the last batch may be shared out unevenly"
        numbers = f"The shapes are {', '.join(str(list(each)) for each in shapes)}"
        advice = "Pad them, gather sums and counts, or set drop_last=True of the loader"
        raise DataError(message("self.all_gather", "called with tensors of other shapes", rule, numbers, advice))
