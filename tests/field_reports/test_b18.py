"""B18, kind of fault: a schedule advances once a process, a micro-batch or a batch, and not once an optimizer step."""

from __future__ import annotations

from functools import cache
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR, StepLR

from tests.support.ranks import run_ranks
from tests.support.training import Case, TinyLM, train_here

PIPELINE = {"pipeline_parallel_size": 2, "num_microbatches": 4}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp2": (2, {}),
    "dp2_zero2": (2, {"sharding": "zero2", "num_microbatches": 2}),
    "pp2": (2, PIPELINE),
    "dp2_pp2_zero1": (4, {**PIPELINE, "sharding": "zero1"}),
    "tp2_pp2": (4, {**PIPELINE, "tensor_parallel_size": 2}),
}


class WarmUp(TinyLM):
    """Warms up over seven optimizer steps, or drops once an epoch."""

    def __init__(self, shape: Any, interval: str) -> None:
        super().__init__(shape)
        self.interval = interval

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        by_step = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 7))
        scheduler = by_step if self.interval == "step" else StepLR(optimizer, 1, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": self.interval}}


class _Rates(pl.Callback):
    def __init__(self) -> None:
        self.rates: list[float] = []

    def on_before_optimizer_step(self, trainer: pl.Trainer, module: pl.LightningModule, optimizer: Any) -> None:
        self.rates.append(optimizer.param_groups[0]["lr"])


def _rates(strategy: dict[str, Any], batch_size: int, interval: str) -> tuple[list[float], int, int]:
    recorder = _Rates()
    trainer = {"accumulate_grad_batches": 2, "max_epochs": 3, "callbacks": [recorder]}
    case = Case(
        strategy=strategy,
        trainer=trainer,
        rows=40,
        batch_size=batch_size,
        steps=-1,
        module=WarmUp,
        module_arguments={"interval": interval},
    )
    train_here(case)
    return recorder.rates, len(recorder.rates), len(set(recorder.rates))


@cache
def _of_one_process(interval: str) -> tuple[list[float], int, int]:
    found: tuple[list[float], int, int] = run_ranks(_rates, 1, {}, 8, interval, process_group=False)[0]
    return found


@pytest.mark.parametrize(
    ("name", "interval"), [*((name, "step") for name in LAYOUTS), *((name, "epoch") for name in ("dp2", "pp2", "dp2_pp2_zero1"))]
)
def test_the_rate_of_every_optimizer_step_is_that_of_one_process(name: str, interval: str) -> None:
    devices, strategy = LAYOUTS[name]
    copies = 2 if name.startswith("dp2") else 1
    want = _of_one_process(interval)
    found = run_ranks(_rates, devices, strategy, 8 // copies, interval, process_group=False)
    assert want[1] == 9  # 40 rows, windows of 2 batches of 8 and one of a single batch, 3 epochs
    assert want[2] == (7 if interval == "step" else 3)
    assert all(each == want for each in found)
