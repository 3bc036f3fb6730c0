"""Every run sets its forecast beside what it measured."""

from __future__ import annotations

from collections.abc import Iterator

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from hybrid_strategy import HybridParallelStrategy
from hybrid_strategy.callbacks.beside import ForecastBesideMeasured, beside


@pytest.fixture(autouse=True)
def _no_group_is_left() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = torch.nn.Sequential(torch.nn.Embedding(16, 8), torch.nn.Linear(8, 16))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.model(batch).logsumexp(-1).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("steps", "accumulate"), [(30, 1), (6, 2), (2, 1)])
def test_measured_values_of_a_run(steps: int, accumulate: int, capsys: pytest.CaptureFixture[str]) -> None:
    callback = ForecastBesideMeasured({"step_seconds": 1.0, "tokens_per_second": 10.0})
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=steps,
        accumulate_grad_batches=accumulate,
        strategy=HybridParallelStrategy(num_microbatches=2),
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = torch.zeros(4 * steps * accumulate, 5, dtype=torch.int64)
    trainer.fit(Module(), DataLoader(data, batch_size=4))
    if steps == 2:
        assert callback.measured is None
        return
    found = callback.measured
    assert found is not None
    assert 0 < found["step_seconds"] < 5
    assert found["tokens_per_second"] == pytest.approx(20 * accumulate / found["step_seconds"])
    assert found["bubble_fraction"] == 0
    assert callback.summary()["forecast"]["step_seconds"] == 1.0
    assert capsys.readouterr().out.count("measured (forecast): step ") == 1


def test_without_a_forecast_it_says_what_was_measured() -> None:
    assert beside(None, {"step_seconds": 0.5}) == "measured: step 500 ms"
    assert beside({"step_seconds": 1.0}, {"step_seconds": 0.5}, "it is a guess").endswith(
        "step 500 ms (1 s, +100 %); it is a guess"
    )
    assert beside(None, {"step_seconds": 0.5}, "it is a guess") == "measured: step 500 ms"
