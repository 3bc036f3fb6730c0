"""From measured rates to a cluster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from hybrid_strategy.spec.cluster import ClusterSpec, KernelSpec, LinkSpec

REACHED = 0.9
"""Measured rates are those of good cases; peaks are set so much above them that coefficients have room both ways."""

CACHED = 4.0
"""Streams from a processor's caches are so much faster than those from memory, at most."""

Rates = Mapping[str, float]


def processor(base: ClusterSpec, loaded: Rates) -> ClusterSpec:
    """One core of a processor while the others are at work too. Names in words, so that a file says what it is of.

    >>> rates = {"fp32_flops": 9e10, "half_flops": 9e9, "attention_flops": 4.5e10, "stream_bytes": 9e9, "launch_seconds": 5e-6,
    ...          "held_bytes": 5e8, "latency_seconds": 1e-4, "bytes_per_second": 1e9}
    >>> found = processor(ClusterSpec(), rates)
    >>> found.peak_fp32_flops, found.kernels.attention_efficiency, found.measured
    (100000000000.0, 0.45, True)
    """
    peak = loaded["fp32_flops"] / REACHED
    kernels = KernelSpec(REACHED, 0.0, min(1.0, loaded["attention_flops"] / peak), 1 / CACHED, loaded["launch_seconds"])
    return replace(
        base,
        peak_flops=loaded["half_flops"] / REACHED,
        peak_fp32_flops=peak,
        memory_bytes_per_second=loaded["stream_bytes"] * CACHED,
        intra_node=_link(base.intra_node, loaded),
        kernels=kernels,
        synchronous=True,
        reserve_bytes=loaded["held_bytes"],
        measured=True,
        source="measured by hybrid doctor",
    )


def gpu(base: ClusterSpec, rates: Rates) -> ClusterSpec:
    """A GPU whose data sheet is `base`."""
    kernels = replace(
        base.kernels,
        matmul_efficiency=min(1.0, rates["half_flops"] / base.peak_flops),
        attention_efficiency=min(1.0, rates["attention_flops"] / base.peak_flops),
        memory_efficiency=min(1.0, rates["stream_bytes"] / base.memory_bytes_per_second),
        launch_seconds=rates["launch_seconds"],
    )
    return replace(
        base,
        kernels=kernels,
        intra_node=_link(base.intra_node, rates),
        memory_bytes=rates["memory_bytes"],
        reserve_bytes=rates["reserve_bytes"],
        measured=True,
        source=f"{base.source}; measured by hybrid doctor",
    )


def _link(base: LinkSpec, rates: Rates) -> LinkSpec:
    if "bytes_per_second" not in rates:
        return base
    wire = max(base.bytes_per_second, rates["bytes_per_second"])
    return LinkSpec(wire, rates["bytes_per_second"] / wire, rates["latency_seconds"])
