"""Which rank sits on which GPU, and which axis therefore leaves the node.

Ranks fill nodes in order, and the most talkative axis is innermost (`spec.layout.MESH_AXES`), so an axis stays inside a node
as long as its size times that of the axes inside it does.
"""

from __future__ import annotations

from dataclasses import dataclass

from hybrid_strategy.planning.links import GroupLink
from hybrid_strategy.spec.cluster import ClusterSpec
from hybrid_strategy.spec.layout import MESH_AXES, Layout


@dataclass(frozen=True)
class Placement:
    """Where the groups of a layout lie on a cluster."""

    layout: Layout
    cluster: ClusterSpec

    def link(self, axis: str) -> GroupLink:
        """The network under the groups of one mesh axis; `data_parallel` is the flattened pair of data axes.

        >>> placed = Placement(Layout(data_parallel_size=8, tensor_parallel_size=4), ClusterSpec(num_nodes=4))
        >>> [(placed.link(axis).level, placed.link(axis).per_node) for axis in ("tensor_parallel", "data_parallel")]
        [('intra_node', 4), ('inter_node', 2)]
        """
        inner = self.layout.context_parallel_size * self.layout.tensor_parallel_size
        if axis == "data_parallel":
            return GroupLink(self.cluster, self.layout.data_parallel_size, inner)
        sizes = self.layout.axis_sizes
        index = MESH_AXES.index(axis)
        stride = 1
        for size in sizes[index + 1 :]:
            stride *= size
        return GroupLink(self.cluster, sizes[index], stride)

    @property
    def replicas(self) -> GroupLink:
        """Under the ranks that hold the same weights and see other samples or tokens: under `ddp` they sum gradients."""
        context = self.layout.context_parallel_size if self.layout.sharding == "ddp" else 1
        stride = self.layout.tensor_parallel_size * (1 if self.layout.sharding == "ddp" else self.shards.size)
        return GroupLink(self.cluster, self.layout.replicate_size * context, stride)

    @property
    def shards(self) -> GroupLink:
        """Under the ranks that split states between them: data-parallel shards, context-parallel ranks among them."""
        context = 1 if self.layout.sharding == "ddp" else self.layout.context_parallel_size
        return GroupLink(self.cluster, self.layout.shard_size * context, self.layout.tensor_parallel_size)

    @property
    def levels(self) -> dict[str, str]:
        """The level of each axis of more than one rank."""
        return {axis: self.link(axis).level for axis, size in zip(MESH_AXES, self.layout.axis_sizes, strict=True) if size > 1}

    def grid(self, max_nodes: int = 0) -> list[list[str]]:
        """The picture: a row a node, a cell a GPU, each `p0 d1 c0 t3` with the axes of more than one rank.

        >>> Placement(Layout(data_parallel_size=2, tensor_parallel_size=2), ClusterSpec(gpus_per_node=2, num_nodes=2)).grid()
        [['d0 t0', 'd0 t1'], ['d1 t0', 'd1 t1']]
        """
        width, world = self.cluster.gpus_per_node, self.layout.world_size
        nodes = -(-world // width)
        shown = min(nodes, max_nodes) if max_nodes else nodes
        return [[self._cell(rank) for rank in range(node * width, min((node + 1) * width, world))] for node in range(shown)]

    def _cell(self, rank: int) -> str:
        layout, at = self.layout, self.layout.coordinate(rank)
        named = (
            ("p", at.pipeline_parallel, layout.pipeline_parallel_size),
            ("d", at.data_parallel, layout.data_parallel_size),
            ("c", at.context_parallel, layout.context_parallel_size),
            ("t", at.tensor_parallel, layout.tensor_parallel_size),
        )
        return " ".join(f"{letter}{index}" for letter, index, size in named if size > 1) or f"r{rank}"
