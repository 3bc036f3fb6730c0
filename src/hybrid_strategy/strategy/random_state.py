"""Random states of a rank: taken for a checkpoint by logical coordinate, and put back; a new coordinate gets one of its own."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping
from typing import Any

import numpy
import torch

from hybrid_strategy.distributed.random_state import keyed_seed, random_stream
from hybrid_strategy.spec.layout import Coordinate

RandomState = dict[str, Any]


def coordinate_key(coordinate: Coordinate) -> str:
    """`pp0_dp1_cp0_tp0`: who the random state belongs to, whatever the rank's number."""
    c = coordinate
    return f"pp{c.pipeline_parallel}_dp{c.data_parallel}_cp{c.context_parallel}_tp{c.tensor_parallel}"


class TakenRandomState:
    """States of Python's, numpy's and torch's generators at one moment: cheap to take with every step."""

    def __init__(self) -> None:
        self._python, self._numpy, self._torch = random.getstate(), numpy.random.get_state(legacy=False), torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None

    def plain(self) -> RandomState:
        """As plain data, for a checkpoint."""
        version, internal, gauss = self._python
        keys = torch.from_numpy(self._numpy["state"]["key"].astype("int64"))
        name, position = self._numpy["bit_generator"], self._numpy["state"]["pos"]
        state: RandomState = {
            "python": [version, list(internal), gauss],
            "numpy": [str(name), keys, int(position), int(self._numpy["has_gauss"]), float(self._numpy["gauss"])],
            "torch": self._torch,
        }
        return state if self._cuda is None else {**state, "cuda": self._cuda}


def put_random_state(state: Mapping[str, Any]) -> None:
    """Puts the states of `TakenRandomState.plain` back."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    numpy.random.set_state((name, keys.numpy().astype("uint32"), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def seed_random_state(seed: int) -> None:
    """Starts all generators of this process anew."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def restore_random_state(coordinate: Coordinate, saved: Mapping[str, RandomState]) -> None:
    """Goes on with the random numbers of `coordinate`.

    Ranks that read the same samples draw the same numbers (`random_stream`), so a rank that the saved layout did not have takes
    the state of another with the same samples. A stream that is not in the checkpoint starts from it and from its own name.
    """
    stream = random_stream(coordinate)
    of_stream = [saved[key] for key in sorted(saved) if stream in key.split("_")]
    state = saved.get(coordinate_key(coordinate), next(iter(of_stream), None))
    if state is not None:
        put_random_state(state)
    elif saved:
        first = hashlib.sha256(saved[min(saved)]["torch"].numpy().tobytes()).hexdigest()
        seed_random_state(keyed_seed(0, first + stream))
