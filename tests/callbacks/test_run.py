"""The callbacks in a run of one process: what they log, print and keep."""

from __future__ import annotations

import time
import warnings
from pathlib import Path
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, Dataset

from hybrid_strategy.callbacks import throughput
from hybrid_strategy.callbacks.progress import PrepareProgress, ProgressLine
from hybrid_strategy.callbacks.results import RunResults
from hybrid_strategy.callbacks.throughput import METRIC, Throughput, data_parallel_size
from hybrid_strategy.strategy.stopping import stop_path


class _Tokens(Dataset):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(0, 16, (8,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


class _Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = torch.nn.Sequential(torch.nn.Embedding(16, 8), torch.nn.Linear(8, 16))

    def _loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(self.model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = self._loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        self.log("val_loss", self._loss(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5)


def _fit(tmp_path, *callbacks: pl.Callback, ckpt_path: Path | None = None, **options) -> pl.Trainer:
    logger = pl.loggers.CSVLogger(tmp_path, name="", version="", flush_logs_every_n_steps=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=1,
            callbacks=list(callbacks),
            logger=logger,
            enable_model_summary=False,
            log_every_n_steps=1,
            **{"max_epochs": 2, "num_sanity_val_steps": -1, "enable_checkpointing": False, **options},
        )
        loader = DataLoader(_Tokens(), batch_size=4)
        trainer.fit(_Module(), loader, DataLoader(_Tokens(), batch_size=8), ckpt_path=ckpt_path)
    return trainer


def test_throughput_counts_every_token_once_and_no_validation(tmp_path, monkeypatch: pytest.MonkeyPatch):
    clock = iter(range(1000))
    monkeypatch.setattr(throughput.time, "perf_counter", lambda: float(next(clock)))
    counted = Throughput(window_steps=2)
    trainer = _fit(tmp_path, counted, ProgressLine())
    assert counted.tokens == 11 * 4 * 8  # 12 batches, the first only warms up
    assert counted.seconds == 11.0
    assert counted.tokens_per_second == counted.mean_tokens_per_second == 32.0
    assert trainer.callback_metrics[METRIC] == 32.0


def test_throughput_multiplies_by_data_parallel_ranks_only():
    trainer = SimpleNamespace(strategy=SimpleNamespace(layout=SimpleNamespace(data_parallel_size=2)), world_size=8)
    assert data_parallel_size(trainer) == 2
    assert data_parallel_size(SimpleNamespace(strategy=object(), world_size=8)) == 8


def test_throughput_is_silent_without_tokens():
    counted = Throughput()
    assert counted.tokens_per_second is None
    assert counted.mean_tokens_per_second is None


def test_results_hold_the_first_and_the_last_validation_loss(tmp_path):
    results = RunResults()
    trainer = _fit(tmp_path, results, ProgressLine())
    summary = results.summary(trainer)
    assert [step for step, _ in results.validation] == [0, 6, 12]
    assert summary["validation_metric"] == "val_loss"
    assert summary["first_validation_loss"] > summary["last_validation_loss"] == summary["best_validation_loss"]
    assert summary["steps"] == 12
    assert not results.stale(trainer)
    rows = (tmp_path / "metrics.csv").read_text().splitlines()
    column = rows[0].split(",").index("val_loss")
    assert float(rows[1].split(",")[column]) == pytest.approx(summary["first_validation_loss"])


def test_results_know_when_the_model_has_changed_since(tmp_path):
    results = RunResults()
    trainer = _fit(tmp_path, results, ProgressLine(), max_steps=3)
    assert results.stale(trainer)


def test_results_name_the_checkpoint_of_the_end_where_the_intervals_left_none(tmp_path):
    results, saver = RunResults(), ModelCheckpoint(dirpath=tmp_path / "saved", every_n_train_steps=100)
    trainer = _fit(tmp_path, results, saver, max_steps=3, enable_checkpointing=True)
    assert results.summary(trainer)["checkpoint"] is None
    trainer.save_checkpoint(stop_path(trainer))
    assert results.summary(trainer)["checkpoint"] == str(tmp_path / "saved" / "last-stopped.ckpt")


@pytest.mark.parametrize(("checked", "stale"), [(-1, True), (0, False)])
def test_a_run_that_goes_on_and_ends_before_its_next_validation_has_none(checked: int, stale: bool, tmp_path):
    begun = _fit(tmp_path, max_steps=3)
    begun.save_checkpoint(tmp_path / "begun.ckpt")
    results = RunResults()
    trainer = _fit(tmp_path, results, max_steps=4, num_sanity_val_steps=checked, ckpt_path=tmp_path / "begun.ckpt")
    assert not results.validation
    assert results.stale(trainer) is stale


def test_the_line_shows_step_loss_and_speed(tmp_path, capsys):
    _fit(tmp_path, Throughput(), ProgressLine(plain_seconds=0.0))
    lines = capsys.readouterr().out.splitlines()
    assert "\x1b" not in "".join(lines)
    assert "\r" not in "".join(lines)
    assert any(line.startswith("step 0  val_loss ") for line in lines)
    last = [line for line in lines if line.startswith("step 12/12")]
    assert len(last) == 1
    assert "|####################|" in last[0]
    assert "train_loss " in last[0]
    assert last[0].endswith("tokens/s")
    assert any(" left" in line for line in lines)


def test_the_line_is_rewritten_on_a_terminal(tmp_path, capsys, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    _fit(tmp_path, ProgressLine(refresh_seconds=0.0))
    out = capsys.readouterr().out
    assert out.count("\r\x1b[2Kstep ") >= 12
    assert out.endswith("\n")


def test_the_line_can_be_switched_off(tmp_path, capsys):
    line = ProgressLine(plain_seconds=0.0)
    line.disable()
    _fit(tmp_path, line)
    assert capsys.readouterr().out == ""


def test_preparing_says_how_far_it_is(capsys):
    progress = PrepareProgress()
    for done in (0, 10, 50, 100):
        progress("tokens", done, 100)
    assert capsys.readouterr().out.splitlines() == ["preparing text: tokens 0% of 100 B", "preparing text: tokens 100% of 100 B"]


def test_time_left_is_told_only_where_there_is_an_end():
    line = ProgressLine()
    line._first_step, line._started = 0, time.monotonic() - 10
    assert line._seconds_left(5, 10.0) == pytest.approx(10.0, rel=0.01)
    assert line._seconds_left(5, float("inf")) is None
    assert line._seconds_left(10, 10.0) is None
