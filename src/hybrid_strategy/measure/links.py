"""Latency and rate of collectives between the processes of this machine."""

from __future__ import annotations

import time
from statistics import median

import torch
import torch.distributed as dist

_SMALL, _LARGE = 4 * 2**10, {"cpu": 8 * 2**20, "cuda": 256 * 2**20}
_ROUNDS = 30


def link_rates(device: torch.device) -> dict[str, float]:
    """Seconds of a hop and bytes/s of a large all-reduce; collective."""
    world = dist.get_world_size()
    small, large = _SMALL, _LARGE[device.type]
    hop = _all_reduce(small, device) / (2 * (world - 1))
    sent = 2 * (world - 1) / world * large
    return {"latency_seconds": hop, "bytes_per_second": sent / max(_all_reduce(large, device) - 2 * (world - 1) * hop, 1e-9)}


def _all_reduce(size: int, device: torch.device) -> float:
    tensor = torch.zeros(size // 4, device=device)
    times = []
    for _ in range(_ROUNDS):
        dist.barrier()
        begin = time.perf_counter()
        dist.all_reduce(tensor)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - begin)
    return median(times[3:])
