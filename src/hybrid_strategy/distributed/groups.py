"""The mesh of a run and the process groups of one rank."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hybrid_strategy.spec.layout import MESH_AXES, Coordinate, Layout


@dataclass(frozen=True)
class Groups:
    """Where this rank stands and whom it talks to; a group is `None` where its axis has size 1.

    Attributes:
        data: data-parallel ranks, which see other samples; `context`: ranks that see other parts of the same samples.
        gradient: both together, over which gradients are summed.
        shard: ranks over which the sharding splits states; context-parallel ranks are among them. `replicate`: their replicas.
        upward: pipeline group for messages to a higher pipeline rank, `downward` for those to a lower one. Two groups, so that on
            a backend that keeps the order of messages between two ranks (NCCL) a send never waits behind a receive.
        control: pipeline group on gloo, for the shapes of messages seen for the first time.
    """

    layout: Layout
    rank: int
    coordinate: Coordinate
    mesh: DeviceMesh
    tensor: dist.ProcessGroup | None
    data: dist.ProcessGroup | None
    context: dist.ProcessGroup | None
    gradient: dist.ProcessGroup | None
    shard: dist.ProcessGroup | None
    replicate: dist.ProcessGroup | None
    upward: dist.ProcessGroup | None
    downward: dist.ProcessGroup | None
    control: dist.ProcessGroup | None
    among: dict[tuple[int, ...], dist.ProcessGroup | None] = field(default_factory=dict)

    def make_group_among(self, pipeline_ranks: tuple[int, ...]) -> None:
        """Makes the group of these pipeline ranks in each pipeline, `among[pipeline_ranks]`; a collective call of all ranks.

        It is `None` on ranks that are not in it.
        """
        if pipeline_ranks in self.among:
            return
        columns = self.layout.world_size // self.layout.pipeline_parallel_size
        members = [[rank * columns + column for rank in pipeline_ranks] for column in range(columns)]
        group, _ = dist.new_subgroups_by_enumeration(members)
        self.among[pipeline_ranks] = group if self.coordinate.pipeline_parallel in pipeline_ranks else None

    @property
    def state_shard(self) -> int:
        """Which of the `layout.state_shards` pieces of the states this rank holds."""
        at = self.coordinate
        return (
            at.data_parallel_shard * self.layout.context_parallel_size + at.context_parallel
            if self.layout.state_shards > 1
            else 0
        )

    @property
    def is_first_replica(self) -> bool:
        """Is this rank the first of those that hold the same where nothing is sharded?"""
        return self.coordinate.data_parallel == 0 and self.coordinate.context_parallel == 0

    @property
    def is_last_pipeline_rank(self) -> bool:
        return self.coordinate.pipeline_parallel == self.layout.pipeline_parallel_size - 1


_GRADIENT, _SHARD = "data_context_parallel", "shard_context_parallel"
"""Flattened axes of the mesh, with context parallelism."""


def build_mesh(layout: Layout, device_type: str) -> tuple[DeviceMesh, dict[str, DeviceMesh]]:
    """The mesh over `MESH_AXES`, and its flattened axes by name: `data_parallel` is the pair of replicate and shard.

    Only axes that are longer than 1 get groups of their own; a flattened axis over one of them shares its group, and all others
    share one of this rank alone. Torch would make one for every rank and axis: each costs a meeting at the store and, on gloo,
    threads that wake a hundred times a second. A flattened axis is kept here, since torch warns (2.13) where it is asked of the
    mesh by its name.
    """
    sizes = dict(zip(MESH_AXES, layout.axis_sizes, strict=True))
    inner = _mesh_of_long_axes(sizes, device_type)
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True) if layout.world_size > 1 else dist.group.WORLD

    def group(name: str, *axes: str) -> Any:
        along = tuple(axis for axis in axes if sizes[axis] > 1)
        if inner is None or not along:
            return alone
        return inner.get_group(along[0]) if len(along) == 1 else inner[along]._flatten(name).get_group()

    ranks = torch.arange(layout.world_size).view(layout.axis_sizes)
    mesh = DeviceMesh.from_group([group(axis, axis) for axis in MESH_AXES], device_type, ranks, mesh_dim_names=MESH_AXES)
    pairs: dict[str, tuple[str, ...]] = {"data_parallel": ("data_parallel_replicate", "data_parallel_shard")}
    if layout.context_parallel_size > 1:
        pairs[_GRADIENT] = ("data_parallel_replicate", "data_parallel_shard", "context_parallel")
        pairs[_SHARD] = ("data_parallel_shard", "context_parallel")
    for name, axes in pairs.items():
        mesh._flatten_mapping[name] = DeviceMesh.from_group(group(name, *axes), device_type, mesh_dim_names=(name,))
    return mesh, {name: mesh._flatten_mapping[name] for name in pairs}


def _mesh_of_long_axes(sizes: dict[str, int], device_type: str) -> DeviceMesh | None:
    long = tuple(axis for axis, size in sizes.items() if size > 1)
    return init_device_mesh(device_type, tuple(sizes[axis] for axis in long), mesh_dim_names=long) if long else None


_BUILT: dict[tuple[Layout, torch.device], tuple[object, Groups]] = {}
"""What was built for a layout, with the processes' common group of that time: a later run in the same process takes it again."""


def forget_ended() -> None:
    """Frees what was built of processes' common groups that have been destroyed since."""
    world = dist.group.WORLD
    for key in [key for key, (of, _) in _BUILT.items() if of is not world]:
        del _BUILT[key]


def build_groups(layout: Layout, device: torch.device) -> Groups:
    """The mesh and the groups of a layout, made once; a collective call of all ranks."""
    forget_ended()
    world = dist.group.WORLD
    if (layout, device) not in _BUILT:
        _BUILT[layout, device] = world, _build(layout, device)
    return _BUILT[layout, device][1]


def _build(layout: Layout, device: torch.device) -> Groups:
    mesh, flattened = build_mesh(layout, device.type)
    rank = dist.get_rank()

    def group(axis: str) -> dist.ProcessGroup | None:
        along = flattened[axis] if axis in flattened else mesh[axis]
        return along.get_group() if along.size() > 1 else None

    split = layout.context_parallel_size > 1
    upward = group("pipeline_parallel")
    downward, control = _more_pipeline_groups(layout, upward)
    return Groups(
        layout=layout,
        rank=rank,
        coordinate=layout.coordinate(rank),
        mesh=mesh,
        tensor=group("tensor_parallel"),
        data=group("data_parallel"),
        context=group("context_parallel"),
        gradient=group(_GRADIENT if split else "data_parallel"),
        shard=group(_SHARD if split and layout.sharding != "ddp" else "data_parallel_shard"),
        replicate=group("data_parallel_replicate"),
        upward=upward,
        downward=downward,
        control=control,
    )


def _more_pipeline_groups(
    layout: Layout, upward: dist.ProcessGroup | None
) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
    """The groups `downward` and `control`. gloo matches messages by tag, so there one group serves all three.

    The same where nothing travels (torch's `fake` backend).
    """
    if upward is None or dist.get_backend(upward) in ("gloo", "fake"):
        return upward, upward
    columns = layout.world_size // layout.pipeline_parallel_size
    members = [list(range(column, layout.world_size, columns)) for column in range(columns)]
    downward, _ = dist.new_subgroups_by_enumeration(members)
    control, _ = dist.new_subgroups_by_enumeration(members, backend="gloo")
    return downward, control
