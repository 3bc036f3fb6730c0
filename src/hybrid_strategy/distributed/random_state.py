"""The random state of each rank: what is a replica draws the same numbers, what is not draws others."""

from __future__ import annotations

import hashlib

import torch

from hybrid_strategy.spec.layout import Coordinate, Layout


def keyed_seed(seed: int, name: str) -> int:
    """A 63-bit seed that depends on `seed` and `name` alone, on every machine.

    >>> keyed_seed(0, "layers.0.weight") == keyed_seed(0, "layers.0.weight") != keyed_seed(1, "layers.0.weight")
    True
    """
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def random_stream(layout: Layout, coordinate: Coordinate) -> str:
    """Ranks of one stream draw the same dropout masks: tensor-parallel peers, whose activations are replicas of each other.

    Data-parallel replicas see other samples and pipeline ranks other layers. Under sequence parallelism the activations of
    tensor-parallel peers are other parts of the sequence.

    >>> layout = Layout(tensor_parallel_size=2, pipeline_parallel_size=2)
    >>> [random_stream(layout, layout.coordinate(rank)) for rank in range(4)]
    ['pp0_dp0', 'pp0_dp0', 'pp1_dp0', 'pp1_dp0']
    """
    stream = f"pp{coordinate.pipeline_parallel}_dp{coordinate.data_parallel}"
    return f"{stream}_tp{coordinate.tensor_parallel}" if layout.sequence_parallel else stream


def seed_rank(layout: Layout, coordinate: Coordinate, seed: int) -> None:
    """Seeds torch's generators of this rank; one process keeps the state the user gave it."""
    if layout.world_size > 1:
        torch.manual_seed(keyed_seed(seed, random_stream(layout, coordinate)))
