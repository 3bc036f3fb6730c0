"""B74, kind of fault: after a resumption the loss jumps: an old rate, an extra Adam step, another random state, other samples.

Six steps are the same six steps when the run is stopped after three and gone on with: bit by bit in the same layout, to
rounding in another one.
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from tests.contract.layouts import LAYOUTS
from tests.contract.models import Module, loader, make_trainer, quiet
from tests.support.ranks import run_ranks


class Warm(Module):
    """Dropout, Adam, a warm-up."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.drop = torch.nn.Dropout(dropout)
        self.seen: list[Any] = []

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        logits = self.drop(self.model(batch["ids"]))
        losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), batch["labels"], reduction="none", ignore_index=-100)
        return losses.mean()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=5)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        optimizer = self.trainer.optimizers[0]
        steps = max((float(state["step"]) for state in optimizer.state.values()), default=0.0)
        rows, draw = batch["row"].tolist(), float(torch.rand(()))
        self.seen.append((float(outputs["loss"]), optimizer.param_groups[0]["lr"], steps, rows, draw))


def _steps(name: str, steps: int, folder: str, precision: str, dropout: float, resumed: bool) -> list[Any]:
    layout, module = LAYOUTS[name], Warm(dropout)
    pl.seed_everything(7, verbose=False)
    with quiet():
        trainer = make_trainer(layout, max_steps=steps, precision=precision)
        data = loader(layout, 48, shuffle=True)
        trainer.fit(module, data, ckpt_path=f"{folder}/three.ckpt" if resumed else None)
        if steps == 3:
            trainer.save_checkpoint(f"{folder}/three.ckpt")
    return module.seen


def _run(name: str, *arguments: Any) -> list[list[Any]]:
    return run_ranks(_steps, LAYOUTS[name].world_size, name, *arguments, process_group=False, timeout=60)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("layout", ["dp2_zero1", "dp2_zero3", "tp2", "pp2_1f1b"])
def test_the_same_layout_goes_on_bit_by_bit(layout: str, precision: str, tmp_path: Any) -> None:
    straight = _run(layout, 6, str(tmp_path), precision, 0.2, False)
    first = _run(layout, 3, str(tmp_path), precision, 0.2, False)
    second = _run(layout, 6, str(tmp_path), precision, 0.2, True)
    assert [[*before, *after] for before, after in zip(first, second, strict=True)] == straight


@pytest.mark.parametrize(("before", "after"), [("dp2_zero3", "pp2_1f1b"), ("tp2", "dp2_zero1"), ("pp2_1f1b", "single")])
def test_another_layout_goes_on_to_rounding(before: str, after: str, tmp_path: Any) -> None:
    straight = _run(after, 6, str(tmp_path), "32-true", 0.0, False)
    _run(before, 3, str(tmp_path), "32-true", 0.0, False)
    resumed = _run(after, 6, str(tmp_path), "32-true", 0.0, True)
    for wanted, got in zip(straight, resumed, strict=True):
        for (loss, rate, steps, rows, _), (loss_now, rate_now, steps_now, rows_now, _) in zip(wanted[3:], got, strict=True):
            assert loss_now == pytest.approx(loss, rel=1e-5)
            assert (rate_now, steps_now, rows_now) == (rate, steps, rows)
