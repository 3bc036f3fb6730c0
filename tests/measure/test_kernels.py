"""What is measured of a machine, in values that make sense."""

from __future__ import annotations

import torch
from torch import nn

from hybrid_strategy.measure.kernels import kernel_rates
from hybrid_strategy.measure.layers import unit_seconds
from hybrid_strategy.measure.machine import gpu, processor
from hybrid_strategy.spec.cluster import ClusterSpec


def test_rates_of_this_processor_make_a_machine() -> None:
    torch.set_num_threads(1)
    rates = kernel_rates(torch.device("cpu"))
    assert 1e8 < rates["stream_bytes"] < 1e13
    assert 1e8 < rates["fp32_flops"] < 1e14
    assert 1e-7 < rates["launch_seconds"] < 1e-2
    found = processor(ClusterSpec(), {**rates, "held_bytes": 5e8, "latency_seconds": 1e-4, "bytes_per_second": 1e9})
    assert found.synchronous
    assert found.kernels.matmul_efficiency * found.peak_fp32_flops == rates["fp32_flops"]
    assert found.kernels.memory_efficiency * found.memory_bytes_per_second == rates["stream_bytes"]


def test_a_gpu_keeps_its_data_sheet() -> None:
    rates = {"half_flops": 2e14, "attention_flops": 1e14, "stream_bytes": 1.7e12, "launch_seconds": 5e-6}
    measured = gpu(ClusterSpec(), {**rates, "memory_bytes": 8e10, "reserve_bytes": 1e9})
    assert measured.peak_flops == ClusterSpec().peak_flops
    assert round(measured.kernels.matmul_efficiency, 2) == 0.64
    assert measured.intra_node == ClusterSpec().intra_node


def test_units_are_timed_in_order() -> None:
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2048))
    found = unit_seconds(model, ("*",), lambda: model(torch.randn(512, 64)), torch.device("cpu"))
    assert list(found) == ["0", "1", "2"]
    assert found["2"] > found["0"] > 0
