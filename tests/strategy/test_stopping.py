"""A signal to any rank: all ranks save the same step once and leave with exit code 75; nothing is lost or done twice."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from hybrid_strategy.checkpoint.stop_request import REQUEST, StopRequest
from hybrid_strategy.checkpoint.verify import committed, read_meta
from hybrid_strategy.strategy.stopping import STOP_NAME, StoppedBySignal
from tests.support.ranks import free_port, run_ranks
from tests.support.resuming import Resumed, assert_same_end, run, run_here

NUMBERS = [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT]


class Interrupter(pl.Callback):
    """One rank sends itself a signal in a batch, and again while the checkpoint of the stop is being made."""

    def __init__(self, number: int, rank: int, hook: str = "batch_start", batch: int = 2, with_workers: bool = False) -> None:
        self.number, self.rank, self.hook, self.batch, self.with_workers = number, rank, hook, batch, with_workers
        self.sent = False

    def _send(self, trainer: pl.Trainer) -> None:
        if trainer.global_rank == self.rank:
            children = multiprocessing.active_children() if self.with_workers else []
            for pid in [os.getpid(), *(child.pid for child in children)]:
                os.kill(pid, self.number)
            if self.with_workers:
                assert len(children) >= 2
                time.sleep(0.3)
            self.sent = True

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, index: int) -> None:
        if self.hook == "batch_start" and index == self.batch and not self.sent:
            self._send(trainer)

    def on_validation_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, *arguments: Any) -> None:
        if self.hook == "validation" and not trainer.sanity_checking and not self.sent:
            self._send(trainer)

    def on_save_checkpoint(self, trainer: pl.Trainer, module: pl.LightningModule, checkpoint: dict[str, Any]) -> None:
        if self.sent:
            os.kill(os.getpid(), signal.SIGTERM)


def stopped_here(case: Resumed) -> dict[str, Any]:
    """Runs until it is stopped; tells how it left."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        run_here(case)
    except StoppedBySignal as stop:
        restored = signal.getsignal(signal.SIGTERM) is before and not REQUEST.listening
        return {"code": stop.code, "text": str(stop), "restored": restored}
    raise AssertionError("it was not stopped")


def with_interrupter(number: int, rank: int, **more: Any) -> Any:
    return _Callbacks(number, rank, more)


class _Callbacks:
    """Makes the callbacks in the rank."""

    def __init__(self, number: int, rank: int, more: dict[str, Any]) -> None:
        self.number, self.rank, self.more = number, rank, dict(more)

    def __call__(self, case: Resumed) -> list[pl.Callback]:
        every = self.more.get("every")
        hooks = {key: value for key, value in self.more.items() if key != "every"}
        saver = ModelCheckpoint(dirpath=case.folder, every_n_train_steps=every or 1000, save_top_k=-1)
        return [Interrupter(self.number, self.rank, **hooks), saver]


CASE = Resumed("", trainer={"default_root_dir": "."})


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize(("world_size", "rank"), [(1, 0), (2, 1)])
def test_any_rank_stops_all_after_one_save(number: int, world_size: int, rank: int, tmp_path: Path) -> None:
    case = replace(CASE, folder=str(tmp_path), batch_size=4 // world_size, callbacks=with_interrupter(number, rank))
    left = run_ranks(stopped_here, world_size, case, process_group=False)
    path = tmp_path / STOP_NAME
    for record in left:
        assert record["code"] == 75
        assert record["text"].endswith(f"after step 3; checkpoint: {path}")
        assert record["restored"]
    assert committed(tmp_path) == [path]
    assert read_meta(path)["global_step"] == 3


@pytest.mark.parametrize("number", NUMBERS)
def test_a_signal_to_every_process_of_a_step_leaves_the_workers_at_work(number: int, tmp_path: Path) -> None:
    case = replace(
        CASE, folder=str(tmp_path), batch_size=2, num_workers=2, callbacks=with_interrupter(number, 1, with_workers=True)
    )
    left = run_ranks(stopped_here, 2, case, process_group=False)
    assert [record["code"] for record in left] == [75, 75]
    assert read_meta(tmp_path / STOP_NAME)["global_step"] == 3


@pytest.mark.parametrize("hook", ["batch_start", "validation"])
def test_it_goes_on_where_it_stopped(hook: str, tmp_path: Path) -> None:
    """Also before the last batch of an epoch, which has been fetched then."""
    case = replace(CASE, folder=str(tmp_path), batch_size=2, module={"dropout": 0.2})
    straight = run(case, 2)
    run_ranks(
        stopped_here, 2, replace(case, callbacks=with_interrupter(signal.SIGTERM, 1, hook=hook, batch=4)), process_group=False
    )
    again = run(replace(case, checkpoint=STOP_NAME), 2)
    for whole, rest in zip(straight, again, strict=True):
        assert rest["events"] == whole["events"][len(whole["events"]) - len(rest["events"]) :]
        assert ("validation" in {event[0] for event in rest["events"][:1]}) == (hook == "validation")
    assert_same_end(straight, again)


def test_a_step_that_is_saved_already_is_not_saved_again(tmp_path: Path) -> None:
    case = replace(CASE, folder=str(tmp_path), callbacks=with_interrupter(signal.SIGTERM, 0, every=1))
    (left,) = run_ranks(stopped_here, 1, case, process_group=False)
    assert STOP_NAME not in {each.name for each in committed(tmp_path)}
    assert "step=3" in left["text"]


def test_a_trainer_that_saves_no_checkpoints_saves_none_when_it_is_stopped(tmp_path: Path) -> None:
    trainer = {"default_root_dir": str(tmp_path), "enable_checkpointing": False}
    case = replace(CASE, folder=str(tmp_path), callbacks=_OnlyInterrupter(), trainer=trainer)
    (left,) = run_ranks(stopped_here, 1, case, process_group=False)
    assert left["code"] == 75
    assert "no checkpoint was to be written" in left["text"]
    assert not list(tmp_path.rglob("*.ckpt"))


class _WithSlowRank:
    def __call__(self, case: Resumed) -> list[pl.Callback]:
        saver = ModelCheckpoint(dirpath=case.folder, every_n_train_steps=1000)
        return [Interrupter(signal.SIGTERM, 0), SlowRank(), saver]


class SlowRank(pl.Callback):
    """Rank 1 is two seconds behind in the batch in which rank 0 is told to stop."""

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, index: int) -> None:
        if trainer.global_rank == 1 and index == 2:
            time.sleep(2.0)


@pytest.mark.parametrize("strategy", [{}, {"pipeline_parallel_size": 2, "num_microbatches": 2}])
def test_a_slow_rank_is_waited_for(strategy: dict[str, Any], tmp_path: Path) -> None:
    case = replace(CASE, folder=str(tmp_path), batch_size=2, strategy=strategy, callbacks=_WithSlowRank())
    left = run_ranks(stopped_here, 2, case, process_group=False, timeout=60)
    assert [record["code"] for record in left] == [75, 75]
    assert read_meta(tmp_path / STOP_NAME)["global_step"] == 3


class _OnlyInterrupter:
    def __call__(self, case: Resumed) -> list[pl.Callback]:
        return [Interrupter(signal.SIGTERM, 0)]


def test_only_the_third_interrupt_raises() -> None:
    before = signal.getsignal(signal.SIGINT)
    request = StopRequest()
    request.listen()
    try:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
        assert request.name == "SIGINT"
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    finally:
        request.ignore()
    assert signal.getsignal(signal.SIGINT) is before


SCRIPT = """
import sys
import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader
from hybrid_strategy import HybridParallelStrategy

class Plain(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = torch.nn.Linear(4, 4)
    def training_step(self, batch, batch_idx):
        if batch_idx == 1 and self.global_rank == 0:
            open(sys.argv[1] + "/training", "w").close()
        return self.model(batch).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3)

if __name__ == "__main__":
    options = dict(logger=False, enable_progress_bar=False, enable_model_summary=False, default_root_dir=sys.argv[1])
    trainer = pl.Trainer(accelerator="cpu", devices=2, strategy=HybridParallelStrategy(), max_epochs=100000, **options)
    trainer.fit(Plain(), DataLoader(torch.ones(64, 4), batch_size=2))
"""


def test_a_plain_script_ends_with_75(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "MASTER_PORT": str(free_port())}
    process = subprocess.Popen([sys.executable, str(script), str(tmp_path)], env=environment, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 120
    while not (tmp_path / "training").exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    _, text = process.communicate(timeout=60)
    assert process.returncode == 75, text.decode()
    assert b"Traceback" not in text
    assert committed(tmp_path / "checkpoints")[0].name == STOP_NAME
