"""Host memory for the copy of the state that a checkpoint in the background is written from."""

from __future__ import annotations

import math

from hybrid_strategy.spec.training import OptimizerSpec


def checkpoint_bytes(num_parameters: int, optimizer: OptimizerSpec, weight_bytes: int = 4) -> int:
    """The tensors of a checkpoint: weights, and the optimizer's states in the weights' own type.

    >>> checkpoint_bytes(1000, OptimizerSpec()), checkpoint_bytes(1000, OptimizerSpec(name="sgd", momentum=0.0))
    (12000, 4000)
    """
    states = 2 if optimizer.name.lower() == "adamw" else int(optimizer.momentum != 0)
    return num_parameters * weight_bytes * (1 + states)


def staging_bytes(whole_bytes: int, world_size: int) -> int:
    """What a rank copies: what it writes. Pieces are of one rank, and replicas share the writing of what they all hold.

    >>> staging_bytes(12000, 8)
    1500
    """
    return math.ceil(whole_bytes / world_size)
