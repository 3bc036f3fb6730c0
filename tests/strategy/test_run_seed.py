"""Ranks that were seeded each for itself are one run all the same: one order of the samples, one set of first weights."""

from __future__ import annotations

import os
import warnings
from typing import Any

import lightning.pytorch as pl
import pytest
import torch.distributed as dist

from hybrid_strategy.strategy.run_seed import agree_on_seed, run_seed
from tests.support.ranks import run_ranks
from tests.support.training import Case, TinyLM, compare, train

STEPS, GLOBAL_BATCH = 6, 8
PIPELINE = {"pipeline_parallel_size": 2, "num_microbatches": 2}
LAYOUTS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "dp2_zero1": (2, 2, {"sharding": "zero1"}),
    "dp2_zero3": (2, 2, {"sharding": "zero3"}),
    "tp2": (2, 1, {"tensor_parallel_size": 2}),
    "pp2": (2, 1, PIPELINE),
    "dp2_pp2": (4, 2, PIPELINE),
}


class SeededByRank(TinyLM):
    """As scripts do that want random numbers of its own for each rank."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        pl.seed_everything(5 + int(os.environ.get("RANK", "0")))


@pytest.mark.parametrize("meta", [True, False])
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_numbers_are_those_of_rank_0_alone(name: str, meta: bool) -> None:
    world_size, copies, strategy = LAYOUTS[name]
    case = Case(batch_size=GLOBAL_BATCH, steps=STEPS, module=SeededByRank, module_arguments={"meta": meta})
    divided = Case(strategy, batch_size=GLOBAL_BATCH // copies, steps=STEPS, module=SeededByRank, module_arguments={"meta": meta})
    compare(train(case, 1), train(divided, world_size))


def _of_rank_0(value: Any) -> Any:
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def _agreed(seed: int | None, variable: str | None) -> tuple[int, str | None, list[str]]:
    rank = int(os.environ["RANK"])
    if rank == 1 and variable is not None:
        os.environ["PL_GLOBAL_SEED"] = variable
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        taken = agree_on_seed(seed if rank == 1 else None, rank, _of_rank_0)
    return run_seed(taken), os.environ.get("PL_GLOBAL_SEED"), [str(each.message) for each in caught]


@pytest.mark.parametrize(
    ("seed", "variable", "words"),
    [(7, None, "seed on rank 1 is 7"), (None, "9", "PL_GLOBAL_SEED on rank 1 is '9'"), (None, None, None)],
)
def test_a_rank_that_is_overruled_says_so(seed: int | None, variable: str | None, words: str | None) -> None:
    first, second = run_ranks(_agreed, 2, seed, variable)
    assert first == (0, None, [])
    assert second[:2] == (0, None)
    assert [each.startswith(f"{words}: a run has one seed, that of rank 0 (0)") for each in second[2]] == [True] * bool(words)
