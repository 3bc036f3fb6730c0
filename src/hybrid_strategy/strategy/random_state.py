"""Random states of a rank: taken for a checkpoint by logical coordinate, and put back where the coordinate exists again."""

from __future__ import annotations

import random
from typing import Any

import numpy
import torch

from hybrid_strategy.spec.layout import Coordinate


def coordinate_key(coordinate: Coordinate) -> str:
    """`pp0_dp1_cp0_tp0`: who the random state belongs to, whatever the rank's number."""
    c = coordinate
    return f"pp{c.pipeline_parallel}_dp{c.data_parallel}_cp{c.context_parallel}_tp{c.tensor_parallel}"


def take_random_state() -> dict[str, Any]:
    """States of Python's, numpy's and torch's generators, as plain data."""
    version, internal, gauss = random.getstate()
    name, keys, position, has_gauss, cached = numpy.random.get_state()
    state: dict[str, Any] = {
        "python": [version, list(internal), gauss],
        "numpy": [str(name), torch.from_numpy(numpy.asarray(keys).astype("int64")), int(position), int(has_gauss), float(cached)],
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def put_random_state(state: dict[str, Any]) -> None:
    """Puts the states of `take_random_state` back."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    numpy.random.set_state((name, keys.numpy().astype("uint32"), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
