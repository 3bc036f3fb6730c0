"""B29, kind of fault: ranks that do not know the monitored value decide otherwise than those that do, or wait for them.

A value that exists on the last stage, or that one rank alone logs, is the same number on every rank, so every rank stops, saves
and lowers the rate at the same time.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import Tensor

from tests.contract.layouts import LAYOUTS
from tests.contract.models import Module, loader, make_trainer, quiet
from tests.support.ranks import run_ranks


class OneRankKnows(Module):
    """`val` is logged by the step, `own` by a hook of the last rank only."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("val", loss)
        return loss

    def on_validation_epoch_end(self) -> None:
        if self.trainer.global_rank == self.trainer.world_size - 1:
            self.log("own", 3.0 - min(self.current_epoch, 2) + 0.1 * self.current_epoch)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "own"}}


def _decisions(name: str, monitor: str, folder: str) -> Any:
    layout = LAYOUTS[name]
    stop = EarlyStopping(monitor, patience=1)
    best = ModelCheckpoint(folder, monitor=monitor, save_top_k=2, filename="{epoch}")
    with quiet():
        trainer = make_trainer(layout, max_epochs=6, callbacks=[stop, best], enable_checkpointing=True)
        trainer.fit(OneRankKnows(), loader(layout, 16), loader(layout, 16, seed=2))
    rate = trainer.optimizers[0].param_groups[0]["lr"]
    paths = sorted(best.best_k_models)
    return trainer.should_stop, trainer.current_epoch, stop.stopped_epoch, best.best_model_path, paths, rate


@pytest.mark.parametrize("monitor", ["val", "own"])
@pytest.mark.parametrize("layout", ["pp2_1f1b", "dp2", "dp2_pp2"])
def test_all_ranks_decide_alike(layout: str, monitor: str, tmp_path: Any) -> None:
    found = run_ranks(_decisions, LAYOUTS[layout].world_size, layout, monitor, str(tmp_path), process_group=False, timeout=60)
    assert all(each == found[0] for each in found)
    assert len(found[0][4]) == 2
    if monitor == "own":  # 3.0, 2.1, 1.2, 1.3, 1.4: the best is epoch 2, and one epoch later patience is over
        assert found[0][1:4] == (4, 3, f"{tmp_path}/epoch=2.ckpt")
