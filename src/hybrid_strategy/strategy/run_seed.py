"""The seed of a run: one for all ranks, whatever each of them was seeded with."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any

from hybrid_strategy.errors import message

_VARIABLE = "PL_GLOBAL_SEED"  # where `seed_everything` leaves it


def run_seed(given: int | None) -> int:
    """The run's seed: given, else that of `seed_everything`, else 0."""
    return given if given is not None else int(os.environ.get(_VARIABLE, "0"))


def agree_on_seed(given: int | None, rank: int, broadcast: Callable[[Any], Any]) -> int | None:
    """Takes the seed of rank 0, from which every rank draws its own stream; collective.

    Where a script seeds each rank otherwise (`seed_everything(42 + rank)`), ranks that share a batch would read other samples.

    Args:
        given: the strategy's `seed` on this rank.
        broadcast: gives every rank what rank 0 has.

    Returns:
        The strategy's `seed` on rank 0.
    """
    mine = (given, os.environ.get(_VARIABLE))
    taken = broadcast(mine)
    if taken == mine:
        return given
    if taken[1] is None:
        os.environ.pop(_VARIABLE, None)
    else:
        os.environ[_VARIABLE] = taken[1]
    name, value = ("seed", given) if taken[0] != given else (_VARIABLE, mine[1])
    rule = f"a run has one seed, that of rank 0 ({run_seed(taken[0])}), from which each rank gets random numbers of its own"
    warnings.warn(message(f"{name} on rank {rank}", value, rule, "", "Set one for all ranks"), stacklevel=2)
    return taken[0]  # type: ignore[no-any-return]
