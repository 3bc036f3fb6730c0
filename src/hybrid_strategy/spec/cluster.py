"""A cluster as the planner sees it: one kind of GPU, so many to a node, so many nodes, three levels of network."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from math import inf
from operator import attrgetter
from typing import Any

from hybrid_strategy.errors import ConfigError, did_you_mean, message


@dataclass(frozen=True)
class LinkSpec:
    """One level of the network, as one GPU sees it.

    Attributes:
        bytes_per_second: wire rate of one GPU in one direction (data sheet). 0: there is no such link.
        efficiency: share of the wire rate that a large collective reaches.
        latency_seconds: time of one hop of a small message.
        call_seconds: time of a collective of no bytes in a group of no hops: its kernel, and the ranks finding each other.
        first_step: what a ring takes on top of its n - 1 steps each way, in steps: small groups reach less of the wire. With it
            and `call_seconds` all-reduces of 1 MiB to 1 GiB over 2 to 8 A100 (vTrain f8dda847 trace/a100) are met within 7 %
            (root mean square), by hops and bytes alone within 23 %.
        peer_bytes_per_second: wire rate to any single peer where that is less (pairwise links, no switch); 0: the same.
    """

    bytes_per_second: float = 0.0
    efficiency: float = 0.8
    latency_seconds: float = 5e-6
    peer_bytes_per_second: float = 0.0
    call_seconds: float = 0.0
    first_step: float = 0.0

    def effective_bytes_per_second(self, group_size: int = 0) -> float:
        """Rate of a large collective in a group of `group_size` GPUs on this level.

        >>> LinkSpec(450e9, 0.8).effective_bytes_per_second() == 360e9
        True
        >>> LinkSpec(448e9, 0.75, peer_bytes_per_second=64e9).effective_bytes_per_second(2) == 48e9
        True
        """
        wire = self.bytes_per_second
        if self.peer_bytes_per_second and group_size > 1:
            wire = min(wire, self.peer_bytes_per_second * (group_size - 1))
        return wire * self.efficiency


@dataclass(frozen=True)
class KernelSpec:
    """What kernels reach on this GPU; one set per kind of GPU, refitted by `hybrid calibrate`.

    Attributes:
        matmul_efficiency: share of `peak_flops` that a large matrix product reaches.
        fp8_efficiency: share of `peak_fp8_flops` that a large matrix product reaches.
        attention_efficiency: share of `peak_flops` that the forward pass of fused attention reaches.
        memory_efficiency: share of `memory_bytes_per_second` that streaming kernels reach.
        launch_seconds: time between two kernels when the processor, not the GPU, sets the pace.
        drain_seconds: time of a kernel on the GPU beside its work: it starts when the one before has drained, and meanwhile most
            units are idle. It makes small micro-batches slower: GPT 3.6B on 64 A100 takes 4 % longer with 2 samples than with 8
            though nothing else differs (vTrain f8dda847 data/ground_truth_multi.csv).
    """

    matmul_efficiency: float = 0.75
    fp8_efficiency: float = 0.6
    attention_efficiency: float = 0.5
    memory_efficiency: float = 0.8
    launch_seconds: float = 6e-6
    drain_seconds: float = 5e-6


@dataclass(frozen=True)
class ClusterSpec:
    """All that planning needs to know of the machines.

    Attributes:
        name: the file in `conf/cluster/`.
        gpu: the product's name.
        memory_bytes: memory of one GPU as the driver reports it.
        peak_flops: dense 16-bit matrix products, FLOP/s (data sheet, without sparsity).
        peak_fp8_flops: dense 8-bit matrix products, FLOP/s; 0: none.
        peak_fp32_flops: 32-bit matrix products without reduced precision, FLOP/s; 0: as fast as in 16 bit (a processor).
        memory_bytes_per_second: rate of the GPU's memory (data sheet).
        intra_node: links inside a node.
        inter_node: links between nodes: this GPU's share of the node's network cards.
        nvlink_domain_size: GPUs joined by `intra_node` links; 0: those of one node. 72 in a GB200 rack.
        reserve_bytes: context of the driver and of the communication library, outside the allocator.
        allocator_fraction: share of the allocated bytes lost to fragmentation.
        synchronous: a kernel ends before the next is launched (a processor): launches add to the kernels' time.
        source: where the numbers are from.
        measured: the coefficients were measured on this machine.
    """

    name: str = "a100_80"
    gpu: str = "A100-SXM-80GB"
    num_nodes: int = 1
    gpus_per_node: int = 8
    memory_bytes: float = 85.0e9
    peak_flops: float = 312e12
    peak_fp8_flops: float = 0.0
    peak_fp32_flops: float = 19.5e12
    memory_bytes_per_second: float = 2.039e12
    intra_node: LinkSpec = field(default_factory=lambda: LinkSpec(300e9))
    inter_node: LinkSpec = field(default_factory=lambda: LinkSpec(25e9, latency_seconds=10e-6))
    nvlink_domain_size: int = 0
    kernels: KernelSpec = field(default_factory=KernelSpec)
    reserve_bytes: float = 1.5e9
    allocator_fraction: float = 0.05
    synchronous: bool = False
    source: str = ""
    measured: bool = False

    def __post_init__(self) -> None:
        for key in ("num_nodes", "gpus_per_node"):
            if getattr(self, key) < 1:
                rule = "it must be a whole number of 1 or more"
                raise ConfigError(message(f"cluster.{key}", getattr(self, key), rule, "", "Set 1 or more"))
        kernels = (
            "matmul_efficiency",
            "attention_efficiency",
            "memory_efficiency",
            *["fp8_efficiency"] * (self.peak_fp8_flops > 0),
        )
        crossed = (("intra_node", self.domain_size > 1), ("inter_node", self.num_gpus > self.domain_size))
        links = [f"{level}.{key}" for level, used in crossed if used for key in ("bytes_per_second", "efficiency")]
        for key in ("memory_bytes", "peak_flops", "memory_bytes_per_second", *(f"kernels.{each}" for each in kernels), *links):
            value = attrgetter(key)(self)
            if not 0 < value < inf:
                advice = "Set more than 0, or leave it out"
                raise ConfigError(message(f"cluster.{key}", value, "it must be more than 0", "", advice))
        times = (
            "kernels.launch_seconds",
            "kernels.drain_seconds",
            "intra_node.latency_seconds",
            "intra_node.call_seconds",
            "intra_node.first_step",
        )
        for key in ("reserve_bytes", "allocator_fraction", *times):
            value = attrgetter(key)(self)
            if not 0 <= value < inf:
                raise ConfigError(
                    message(f"cluster.{key}", value, "it may not be less than 0", "", "Set 0 or more, or leave it out")
                )

    @property
    def num_gpus(self) -> int:
        return self.num_nodes * self.gpus_per_node

    @property
    def domain_size(self) -> int:
        """GPUs that reach each other over `intra_node` links."""
        return min(self.nvlink_domain_size or self.gpus_per_node, max(self.num_gpus, 1))

    def with_nodes(self, num_nodes: int) -> ClusterSpec:
        """The same machines, another number of them."""
        return replace(self, num_nodes=num_nodes)


_NESTED = {"intra_node": LinkSpec, "inter_node": LinkSpec, "kernels": KernelSpec}


def cluster_from_mapping(values: Mapping[str, Any]) -> ClusterSpec:
    """A cluster from the plain data of a `conf/cluster/*.yaml`.

    Raises:
        ConfigError: a key is not known; the message names the nearest.

    >>> cluster_from_mapping({"name": "mine", "intra_node": {"bytes_per_second": 450e9}}).intra_node.bytes_per_second
    450000000000.0
    """
    known: dict[str, Any] = {}
    for key, value in values.items():
        kind = _NESTED.get(key)
        _check_known(f"cluster.{key}", key, ClusterSpec)
        if kind is not None and isinstance(value, Mapping):
            for inner in value:
                _check_known(f"cluster.{key}.{inner}", inner, kind)
            value = kind(**value)
        known[key] = value
    return ClusterSpec(**known)


def _check_known(full_key: str, key: str, kind: type) -> None:
    names = [each.name for each in fields(kind)]
    if key not in names:
        raise ConfigError(message(full_key, "set", "there is no such key", "", did_you_mean(key, names)))
