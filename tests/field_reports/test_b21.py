"""B21, kind of fault: an average of the weights is wrong, or hangs, where each rank has a piece of them.

Pieces of any size are averaged as one process averages whole weights; validation with the average does not change training by a
bit; the average is saved and loads into another layout.
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from hybrid_strategy import ParallelPlan
from tests.contract.items import Item, compare_item
from tests.contract.layouts import ContractLayout
from tests.contract.models import LossRecorder, make_trainer

UNEVEN = {
    layout.name: layout
    for layout in (
        ContractLayout("dp2_zero1", 2, 2, {"sharding": "zero1"}),
        ContractLayout("dp3_zero3", 3, 3, {"sharding": "zero3"}),
        ContractLayout("tp2", 2, 1, {"tensor_parallel_size": 2}),
        ContractLayout("tp2_dp2_zero3", 4, 2, {"tensor_parallel_size": 2, "sharding": "zero3"}),
        ContractLayout("pp2", 2, 1, {"pipeline_parallel_size": 2, "num_microbatches": 2}),
    )
}


class FiveRows(pl.LightningModule):
    """Weights of 5 and 7 rows, which no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            self.model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 7), nn.Linear(7, 1))

    def parallel_plan(self) -> ParallelPlan:
        return ParallelPlan(units=("*",), tensor={"0": "colwise", "1": "rowwise"})

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return F.mse_loss(self.model(batch[0]), batch[1])

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val", self.training_step(batch, batch_idx))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.05)


def _data(layout: ContractLayout) -> DataLoader[Any]:
    inputs = torch.randn(36, 3, generator=torch.Generator().manual_seed(3))
    return DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=12 // layout.data_parallel_size)


def average(layout: ContractLayout, folder: str) -> Any:
    """Three epochs, validated with the average after each, saved after two and gone on with."""
    runs = {}
    for name, validated in (("validated", 1.0), ("not", 0)):
        losses = LossRecorder()
        kept = ModelCheckpoint(f"{folder}/{name}", filename="{epoch}", save_top_k=-1)
        callbacks = [EMAWeightAveraging(decay=0.9), losses, kept]
        trainer = make_trainer(layout, max_epochs=3, callbacks=callbacks, limit_val_batches=validated, enable_checkpointing=True)
        trainer.fit(FiveRows(), _data(layout), _data(layout))
        runs[name] = losses.losses
    module, again = FiveRows(), LossRecorder()
    trainer = make_trainer(layout, max_epochs=3, callbacks=[EMAWeightAveraging(decay=0.9), again])
    trainer.fit(module, _data(layout), _data(layout), ckpt_path=f"{folder}/validated/epoch=1.ckpt")
    final = trainer.validate(module, _data(layout), verbose=False)
    bits = runs["validated"] == runs["not"]
    return {"losses": runs["validated"], "bits": bits, "again": again.losses, "final": final}


def elsewhere(layout: ContractLayout, folder: str) -> Any:
    """What a checkpoint of this layout holds as weights is the average; loaded by a run without one."""
    kept = ModelCheckpoint(folder, filename="kept")
    trainer = make_trainer(layout, max_epochs=2, callbacks=[EMAWeightAveraging(decay=0.9), kept], enable_checkpointing=True)
    trainer.fit(FiveRows(), _data(layout))
    plain = make_trainer(layout)
    return {"val": plain.validate(FiveRows(), _data(layout), ckpt_path=f"{folder}/kept.ckpt", verbose=False)}


@pytest.mark.parametrize("layout", UNEVEN)
@pytest.mark.parametrize("run", [average, elsewhere])
def test_averages_of_uneven_pieces(run: Any, layout: str) -> None:
    result, why = compare_item(Item(f"b21_{run.__name__}", 3, run, relative=1e-5), UNEVEN[layout])
    assert result == "same", "\n".join(why[:10])
