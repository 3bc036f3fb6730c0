"""B16, kind of fault: data-parallel ranks whose data ends at different times wait for each other for ever.

All ranks stop where the first has no more, in every epoch, and have trained what one process trains on the batches that all had.
(What a dataset raises on one rank ends all: tests/strategy/test_failures.py.)
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from hybrid_strategy import HybridParallelStrategy
from tests.support.ranks import run_ranks
from tests.support.training import SHAPE, Recorder, TinyLM, Tokens, compare

ROWS, EPOCHS = 2, 2
PIPELINE = {"pipeline_parallel_size": 2, "num_microbatches": 2}
LAYOUTS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "dp2": (2, 2, {}),
    "dp3_zero1": (3, 3, {"sharding": "zero1"}),
    "dp2_zero3": (2, 2, {"sharding": "zero3"}),
    "dp2_pp2": (4, 2, {**PIPELINE, "sharding": "zero2"}),
}
# batches of each data-parallel rank
ENDS = {"the first has one more": (4, 3, 4), "the last has more": (3, 3, 5), "one has none": (3, 0, 3)}


class Share(IterableDataset[Any]):
    """Ready batches of one data-parallel rank; the n-th batches of all ranks together are the n-th global batch."""

    data_parallel_sharded = True

    def __init__(self, data: Tokens, copies: int, rank: int, batches: int) -> None:
        self.data, self.copies, self.rank, self.batches = data, copies, rank, batches

    def __iter__(self) -> Iterator[Any]:
        for number in range(self.batches):
            first = (number * self.copies + self.rank) * ROWS
            rows = [self.data[index] for index in range(first, first + ROWS)]
            yield {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def _fit(strategy: dict[str, Any], share: tuple[int, ...] | None, copies: int, common: int, workers: int) -> dict[str, Any]:
    """Trains on what this rank has; `share` is None for the one process that reads the common batches whole."""
    os.environ["PL_GLOBAL_SEED"] = "3"
    data, world = Tokens(64, SHAPE.sequence_length, SHAPE.vocab_size), int(os.environ["WORLD_SIZE"])
    loader: DataLoader[Any] = DataLoader(torch.utils.data.Subset(data, range(common * copies * ROWS)), copies * ROWS)
    if share is not None:
        rank = int(os.environ["RANK"]) % copies
        loader = DataLoader(Share(data, copies, rank, share[rank]), batch_size=None, num_workers=workers and 1)
    recorder, module = Recorder(), TinyLM(SHAPE)
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=world,
            strategy=HybridParallelStrategy(**strategy, timeout=20.0),
            callbacks=[recorder],
            max_epochs=EPOCHS,
            enable_model_summary=False,
            **quiet,
        )
        trainer.fit(module, loader)
    return {"initial": recorder.initial, "steps": recorder.steps, "global_step": trainer.global_step}


CASES = [
    *(("dp2", ends, 0) for ends in ENDS),
    *((name, "the last has more", 0) for name in ("dp3_zero1", "dp2_zero3")),
    ("dp2_pp2", "the first has one more", 1),
]


@pytest.mark.parametrize(("name", "ends", "workers"), CASES)
def test_all_stop_where_the_first_has_no_more(name: str, ends: str, workers: int) -> None:
    world_size, copies, strategy = LAYOUTS[name]
    share = ENDS[ends][:copies]
    common = min(share)
    found = run_ranks(_fit, world_size, strategy, share, copies, common, workers, timeout=60, process_group=False)
    assert [each["global_step"] for each in found] == [EPOCHS * common] * world_size
    if common:
        compare(run_ranks(_fit, 1, {}, None, copies, common, 0, process_group=False), found)
