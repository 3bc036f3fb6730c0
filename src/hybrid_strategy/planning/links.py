"""How long a collective takes: latency of its hops and bytes over the rate of the slowest level it crosses.

Bytes that a rank sends (and receives) for a tensor of S bytes over n ranks, bandwidth-optimal
(nccl-tests a0b82b22 doc/PERFORMANCE.md): all-reduce 2 (n-1)/n S, all-gather and reduce-scatter (n-1)/n S of the whole tensor,
all-to-all (n-1)/n S, broadcast S, send S.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import ceil, log2

from hybrid_strategy.spec.cluster import ClusterSpec

_SHARE = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0, "all_to_all": 1.0}


def sent_bytes(collective: str, tensor_bytes: float, group_size: int) -> float:
    """Bytes that one rank sends in one call; `tensor_bytes` is the size of the whole tensor.

    1e9 fp32 gradients over 8 ranks are 7.0 GB a rank, over 64 ranks 7.9 GB; 8 GB is the limit for many ranks:

    >>> [round(sent_bytes("all_reduce", 1e9 * 4, ranks) / 1e9, 1) for ranks in (1, 8, 64)]
    [0.0, 7.0, 7.9]
    >>> sent_bytes("all_gather", 800, 8) + sent_bytes("reduce_scatter", 800, 8) == sent_bytes("all_reduce", 800, 8)
    True
    """
    if group_size <= 1:
        return 0.0
    share = _SHARE.get(collective)
    return tensor_bytes if share is None else share * tensor_bytes * (group_size - 1) / group_size


@dataclass(frozen=True)
class GroupLink:
    """The network under one process group.

    Attributes:
        cluster: the machines.
        size: ranks of the group.
        stride: distance between neighbours in global ranks (1 for the innermost axis).
    """

    cluster: ClusterSpec
    size: int
    stride: int = 1

    @cached_property
    def per_node(self) -> int:
        """Members that share a node (or an NVLink domain)."""
        return max(1, min(self.size, self.cluster.domain_size // self.stride))

    @property
    def num_nodes(self) -> int:
        """Nodes (or NVLink domains) that the group spans."""
        return ceil(self.size / self.per_node)

    @property
    def level(self) -> str:
        """The slowest level that the group crosses: `none`, `intra_node` or `inter_node`."""
        if self.size <= 1:
            return "none"
        return "intra_node" if self.num_nodes == 1 else "inter_node"

    @cached_property
    def bytes_per_second(self) -> float:
        """Rate of a large collective, per rank.

        A group that leaves the node uses the cards of all its members in a node, all groups of the node at the same time:
        eight members reach eight cards' rate, but no more than the links inside the node.
        """
        inside = self.cluster.intra_node.effective_bytes_per_second(self.per_node)
        if self.num_nodes == 1:
            return inside
        across = self.cluster.inter_node.effective_bytes_per_second() * self.per_node
        return min(inside, across) if self.per_node > 1 else across

    def latency_seconds(self, collective: str) -> float:
        """The call, and hops times latency: 2 (n-1) or n-1 around a ring; up and down a tree for an all-reduce between nodes."""
        near, far = self.cluster.intra_node.latency_seconds, self.cluster.inter_node.latency_seconds
        if self.size <= 1:
            return 0.0
        if collective in ("send", "broadcast"):
            return far if self.num_nodes > 1 else near
        call = self.cluster.intra_node.call_seconds
        inner = (self.per_node - 1) * near
        outer = (self.num_nodes - 1) * far
        if collective == "all_reduce":
            return call + 2 * (inner + min(outer, ceil(log2(self.num_nodes)) * far if self.num_nodes > 1 else 0.0))
        return call + inner + outer

    def seconds(self, collective: str, tensor_bytes: float) -> float:
        """Time of one call over a tensor of `tensor_bytes` in all.

        1 GiB over 8 A100 takes 8.2 ms as measured (vTrain f8dda847 trace/a100: 229 GB/s), 1 MiB over 2 of them 45 us:

        >>> from hybrid_strategy.spec.cluster import LinkSpec
        >>> a100 = ClusterSpec(intra_node=LinkSpec(300e9, 0.79, 2.5e-6, call_seconds=3.6e-5, first_step=0.23))
        >>> round(1e3 * GroupLink(a100, 8).seconds("all_reduce", 2**30), 1)
        8.3
        >>> round(1e6 * GroupLink(a100, 2).seconds("all_reduce", 2**20))
        46
        """
        if self.size <= 1:
            return 0.0
        sent = sent_bytes(collective, tensor_bytes, self.size)
        if collective in _SHARE and self.num_nodes == 1:
            sent *= 1 + self.cluster.intra_node.first_step / (self.size - 1)
        return self.latency_seconds(collective) + sent / self.bytes_per_second
