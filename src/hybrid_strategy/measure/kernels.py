"""Rates of one process: matrix products, attention, streams, small operations."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

Rates = dict[str, float]

_SIZES = {"cpu": (1024, 64 * 2**20, 0.15), "cuda": (8192, 2**30, 0.1)}
"""Side of a matrix product, bytes of a stream and seconds of one measurement, by kind of device."""


def kernel_rates(device: torch.device) -> Rates:
    """FLOP/s of products in 32 and in 16 bit and of attention, bytes/s of a stream, seconds of a small operation."""
    side, size, seconds = _SIZES[device.type]
    found = {
        "fp32_flops": _product(side, torch.float32, device, seconds),
        "half_flops": _product(side, torch.bfloat16, device, seconds),
        "attention_flops": _attention(device, seconds),
    }
    source = torch.zeros(size // 4, device=device)
    target = torch.empty_like(source)
    found["stream_bytes"] = 2 * size / _seconds(lambda: target.copy_(source), device, seconds)
    found["launch_seconds"] = _launch(device)
    return found


def _product(side: int, kind: torch.dtype, device: torch.device, seconds: float) -> float:
    left, right = (torch.randn(side, side, device=device).to(kind) for _ in range(2))
    return 2.0 * side**3 / _seconds(lambda: left @ right, device, seconds)


def _attention(device: torch.device, seconds: float) -> float:
    """FLOP/s of the forward pass of causal attention, of which only the causal half counts."""
    heads, length, size = (4, 512, 64) if device.type == "cpu" else (32, 4096, 128)
    kind = torch.float32 if device.type == "cpu" else torch.bfloat16
    query, key, value = (torch.randn(1, heads, length, size, device=device, dtype=kind) for _ in range(3))
    once = _seconds(lambda: F.scaled_dot_product_attention(query, key, value, is_causal=True), device, seconds)
    return 2.0 * heads * length * length * size / once


def _launch(device: torch.device) -> float:
    """Seconds of one small operation that autograd follows."""
    values = torch.zeros(16, device=device, requires_grad=True)
    count = 2000
    for _ in range(2):
        begin, result = time.perf_counter(), values
        for _ in range(count):
            result = result + 1.0
        elapsed = time.perf_counter() - begin
    _wait(device)
    return elapsed / count


def _seconds(function: Callable[[], object], device: torch.device, seconds: float) -> float:
    """Of one call: the best of several rounds, so that a neighbour's work does not count."""
    function()
    _wait(device)
    best, spent = float("inf"), 0.0
    while spent < seconds:
        begin = time.perf_counter()
        function()
        _wait(device)
        elapsed = time.perf_counter() - begin
        best, spent = min(best, elapsed), spent + elapsed
    return best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
