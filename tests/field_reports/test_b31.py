"""B31, kind of fault: predictions of several ranks come doubled, in another order, or without saying of which samples.

`trainer.predict` returns the rows of the dataset in order, once, on rank 0; a writer callback gets the indices of the samples of
each batch, and each sample is written by one data-parallel rank.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import BasePredictionWriter

from tests.contract.evaluation_items import Evaluated
from tests.contract.layouts import LAYOUTS
from tests.contract.models import loader, make_trainer, quiet
from tests.support.ranks import run_ranks


class Writer(BasePredictionWriter):
    def __init__(self) -> None:
        super().__init__("batch_and_epoch")
        self.batches: list[Any] = []
        self.epoch: Any = None

    def write_on_batch_end(
        self, trainer: Any, module: Any, prediction: Any, indices: Any, batch: Any, batch_idx: int, loader_idx: int
    ) -> None:
        self.batches.append((indices, prediction["row"].tolist()))

    def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, indices: Any) -> None:
        self.epoch = [list(each) for each in indices[0]]


def _predicted(name: str, size: int, returned: bool) -> Any:
    layout, writer = LAYOUTS[name], Writer()
    with quiet():
        trainer = make_trainer(layout, callbacks=[writer])
        found = trainer.predict(Evaluated(), loader(layout, size), return_predictions=returned)
    rows = None if found is None else torch.cat([each["row"] for each in found]).tolist()
    return rows, writer.batches, writer.epoch, trainer.strategy.layout.coordinate(trainer.global_rank).data_parallel


@pytest.mark.parametrize("size", [9, 16])
@pytest.mark.parametrize("layout", ["dp2", "tp2", "pp2_1f1b", "dp2_pp2", "dp2_zero3"])
def test_every_sample_is_predicted_once_and_named(layout: str, size: int) -> None:
    for returned in (True, False):
        ranks = run_ranks(_predicted, LAYOUTS[layout].world_size, layout, size, returned, process_group=False)
        assert ranks[0][0] == (list(range(size)) if returned else None)
        seen: dict[int, list[int]] = {}
        for _, batches, epoch, data_parallel in ranks:
            for indices, rows in batches:
                assert indices == rows, "the indices are those of the samples predicted, none of padding"
            mine = [index for indices, _ in batches for index in indices]
            assert mine == [index for batch in epoch for index in batch]
            assert seen.setdefault(data_parallel, mine) == mine, "peers of a data-parallel rank have the same samples"
        assert sorted(index for mine in seen.values() for index in mine) == list(range(size))
