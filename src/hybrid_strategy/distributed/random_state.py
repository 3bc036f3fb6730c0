"""The random state of each rank: ranks that read the same samples draw the same numbers, others draw others."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from typing import Any

import numpy
import torch

from hybrid_strategy.spec.layout import Coordinate, Layout


def keyed_seed(seed: int, name: str) -> int:
    """A 63-bit seed that depends on `seed` and `name` alone, on every machine.

    >>> keyed_seed(0, "layers.0.weight") == keyed_seed(0, "layers.0.weight") != keyed_seed(1, "layers.0.weight")
    True
    """
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def random_stream(coordinate: Coordinate) -> str:
    """The name of a rank's stream: that of the samples it reads.

    Tensor-, context- and pipeline-parallel peers work on the same samples, so what hooks and steps draw for these must be the
    same on all of them; inside of layers they go apart (`parallel.step_random`, `parallel.tensor.random`).

    >>> layout = Layout(data_parallel_size=2, pipeline_parallel_size=2)
    >>> [random_stream(layout.coordinate(rank)) for rank in range(4)]
    ['dp0', 'dp1', 'dp0', 'dp1']
    """
    return f"dp{coordinate.data_parallel}"


def has_peers(layout: Layout) -> bool:
    """Are there ranks that read the same samples?"""
    return layout.world_size > layout.data_parallel_size


def torch_generators(device: torch.device) -> list[torch.Generator]:
    """Those that torch draws from on the CPU and on `device`."""
    if device.type != "cuda":
        return [torch.default_generator]
    index = device.index if device.index is not None else torch.cuda.current_device()
    return [torch.default_generator, torch.cuda.default_generators[index]]


def seed_generators(seed: int, generators: Sequence[torch.Generator]) -> None:
    """Starts Python's and numpy's generators and the given ones of torch anew."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    for generator in generators:
        generator.manual_seed(seed)


def print_of_generators(generators: Sequence[torch.Generator]) -> int:
    """A positive number of 62 bits that tells where Python's and numpy's generators and the given ones of torch stand."""
    of_numpy: Any = numpy.random.get_state(legacy=False)
    digest = hashlib.blake2b(of_numpy["state"]["key"].tobytes())
    for each in generators:
        digest.update(each.get_state().numpy().tobytes())
    digest.update(repr((of_numpy["state"]["pos"], hash(random.getstate()[1]))).encode())
    return int.from_bytes(digest.digest()[:8], "big") >> 2


def seed_rank(layout: Layout, coordinate: Coordinate, seed: int, device: torch.device) -> None:
    """Seeds torch's generators of this rank; one process keeps the states the user gave it.

    Where ranks read the same samples Python's and numpy's are seeded too: nobody else would make them draw alike.
    """
    own = keyed_seed(seed, random_stream(coordinate))
    if layout.world_size > 1:
        torch.manual_seed(own)
    if has_peers(layout):
        seed_generators(own, torch_generators(device))
