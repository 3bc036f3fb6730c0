"""Lightning's own words for checkpoints: `last`, `best`, `hpc`, a path; intervals, retention, weights; in the background too."""

from __future__ import annotations

import os
import signal
import stat
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from hybrid_strategy import HybridParallelStrategy
from hybrid_strategy.callbacks.final_checkpoint import FinalCheckpoint
from hybrid_strategy.callbacks.retention import KeepCheckpoints
from hybrid_strategy.checkpoint.search import committed, search
from hybrid_strategy.checkpoint.verify import read_meta
from hybrid_strategy.errors import ConfigError
from hybrid_strategy.strategy.stopping import STOP_NAME, StoppedBySignal
from tests.strategy.test_stopping import Interrupter
from tests.support.ranks import RankFailedError, run_ranks
from tests.support.resuming import DroppingLM, Event, Numbered, Resumed, assert_same_end, run, run_here

CASE = Resumed("", batch_size=2, module={"dropout": 0.2})
BACKGROUND = [{}, {"asynchronous_checkpoint": True}]


class Savers:
    """Makes the callbacks in the rank: a ModelCheckpoint of these settings, and the one for the end."""

    def __init__(self, **options: Any) -> None:
        self.options = options

    def __call__(self, case: Resumed) -> list[pl.Callback]:
        return [FinalCheckpoint(), ModelCheckpoint(dirpath=case.folder, **self.options)]


def after_step(records: list[dict[str, Any]], step: int) -> list[list[Event]]:
    """What each rank did after `step`, which is not the last of an epoch."""
    rest = []
    for record in records:
        at = next(index for index, event in enumerate(record["events"]) if event[0] == "batch" and event[3] == step)
        rest.append(record["events"][at + 1 :])
    return rest


@pytest.mark.parametrize("strategy", BACKGROUND)
def test_last_goes_on_where_the_newest_was_saved(strategy: dict[str, Any], tmp_path: Path) -> None:
    case = replace(CASE, folder=str(tmp_path), strategy=strategy)
    savers = Savers(every_n_train_steps=2, save_top_k=1, save_last=True)
    straight = run(case, 2)
    run(replace(case, trainer={"max_steps": 4}, callbacks=savers), 2)
    assert {each.name for each in committed(tmp_path)} == {"epoch=0-step=4.ckpt", "last.ckpt"}
    again = run(replace(case, checkpoint="last", callbacks=savers), 2)
    assert [record["events"] for record in again] == after_step(straight, 4)
    assert_same_end(straight, again)


def test_the_end_is_saved_where_the_intervals_left_it_out(tmp_path: Path) -> None:
    case = replace(CASE, folder=str(tmp_path))
    straight = run(case, 2)
    savers = Savers(every_n_train_steps=3, save_top_k=1)
    run(replace(case, trainer={"max_steps": 3}, callbacks=savers), 2)
    assert [each.name for each in committed(tmp_path)] == ["epoch=0-step=3.ckpt"]
    for limit in (4, 5):  # the second takes the place of the first
        run(replace(case, trainer={"max_steps": limit}, callbacks=savers, checkpoint="epoch=0-step=3.ckpt"), 2)
        assert read_meta(tmp_path / STOP_NAME)["global_step"] == limit
    again = run(replace(case, checkpoint="last", callbacks=Savers(every_n_train_steps=100)), 2)
    assert [record["events"] for record in again] == after_step(straight, 5)
    assert_same_end(straight, again)


@pytest.mark.parametrize("strategy", BACKGROUND)
def test_the_newest_are_kept_and_the_others_go(strategy: dict[str, Any], tmp_path: Path) -> None:
    savers = Savers(every_n_train_steps=1, save_top_k=2, monitor="step", mode="max", filename="{step}")
    run(replace(CASE, folder=str(tmp_path), strategy=strategy, callbacks=savers, trainer={"max_steps": 5}), 2)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["last", "step=4.ckpt", "step=5.ckpt"]
    assert (tmp_path / "last").read_text() == "step=5.ckpt\n"


class Keepers:
    """A ModelCheckpoint that keeps all, and what keeps less."""

    def __init__(self, mode: str, **options: Any) -> None:
        self.mode, self.options = mode, options

    def __call__(self, case: Resumed) -> list[pl.Callback]:
        names = {"filename": "{step}", "auto_insert_metric_name": False}
        saver = ModelCheckpoint(
            dirpath=case.folder, every_n_train_steps=1, save_top_k=-1, monitor="score", mode=self.mode, **names
        )
        return [_Score(), KeepCheckpoints(mode=self.mode, **self.options), saver]


class _Score(pl.Callback):
    """Best in the middle of the run."""

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *arguments: Any) -> None:
        module.log("score", float(abs(trainer.global_step - 3)))


@pytest.mark.parametrize("strategy", BACKGROUND)
def test_the_newest_and_the_best_are_kept(strategy: dict[str, Any], tmp_path: Path) -> None:
    case = replace(CASE, folder=str(tmp_path), strategy=strategy, trainer={"max_steps": 6})
    run(replace(case, callbacks=Keepers("min", keep_last=2, keep_best=1)), 2)
    assert sorted(each.name for each in committed(tmp_path)) == ["3.ckpt", "5.ckpt", "6.ckpt"]
    more = replace(case, trainer={"max_steps": 8}, checkpoint="5.ckpt")
    run(replace(more, callbacks=Keepers("min", keep_last=1)), 2)
    assert sorted(each.name for each in committed(tmp_path)) == ["5.ckpt", "8.ckpt"]
    with pytest.raises(ConfigError, match="save_top_k is 1"):
        KeepCheckpoints().setup(SimpleNamespace(checkpoint_callback=ModelCheckpoint(save_top_k=1)), None, "fit")


def evaluate_best(case: Resumed) -> dict[str, Any]:
    """Fits, keeps the first (worst) checkpoint as `best`, and evaluates it by each of its names."""
    saver = ModelCheckpoint(dirpath=case.folder, monitor="val_loss", mode="max", save_top_k=1)
    options = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "limit_val_batches": 2}
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy=HybridParallelStrategy(**case.strategy), max_epochs=2, callbacks=[saver], **options
    )
    loader, module = DataLoader(Numbered(12), batch_size=2), DroppingLM(dropout=0.0)
    trainer.fit(module, loader, loader)
    now = trainer.validate(module, loader, verbose=False)[0]["val_loss"]
    found = {}
    for name, path, more in (
        ("best", "best", {}),
        ("path", saver.best_model_path, {}),
        ("weights_only", saver.best_model_path, {"weights_only": True}),
        ("not_weights_only", saver.best_model_path, {"weights_only": False}),
    ):
        found[name] = trainer.validate(module, loader, ckpt_path=path, verbose=False, **more)[0]["val_loss"]
    trainer.save_checkpoint(os.path.join(case.folder, "weights.ckpt"), weights_only=True)
    found["weights"] = trainer.validate(module, loader, ckpt_path=os.path.join(case.folder, "weights.ckpt"))[0]["val_loss"]
    return {"best": float(saver.best_model_score), "now": now, "found": found}


def test_best_is_evaluated_by_each_of_its_names(tmp_path: Path) -> None:
    for record in run_ranks(evaluate_best, 2, replace(CASE, folder=str(tmp_path)), process_group=False):
        assert record["now"] != pytest.approx(record["best"], rel=1e-4)
        assert set(record["found"]) == {"best", "path", "weights_only", "not_weights_only", "weights"}
        for name, loss in record["found"].items():
            assert loss == pytest.approx(record["best"], rel=1e-6), name


def test_training_does_not_go_on_from_weights_alone(tmp_path: Path) -> None:
    case = replace(CASE, folder=str(tmp_path), trainer={"max_steps": 2})
    run(replace(case, callbacks=Savers(every_n_train_steps=1, save_weights_only=True, filename="weights")), 2)
    with pytest.raises(RankFailedError, match="it holds weights only, so training cannot go on from it") as caught:
        run(replace(case, checkpoint="weights.ckpt"), 2)
    assert str(caught.value).count("it holds weights only") >= 2


def slow_writes(case: Resumed) -> dict[str, Any]:
    """A disk so slow that each save finds the one before it at work."""
    from hybrid_strategy.checkpoint import saving

    write, saving.write_items = saving.write_items, _late(saving.write_items)
    try:
        return run_here(case)
    finally:
        saving.write_items = write


def _late(write: Any) -> Any:
    def after_a_while(*arguments: Any) -> Any:
        time.sleep(0.4)
        return write(*arguments)

    return after_a_while


@pytest.mark.parametrize("busy", ["wait", "skip"])
def test_a_save_that_comes_too_early(busy: str, tmp_path: Path) -> None:
    strategy = {"asynchronous_checkpoint": True, "checkpoint_when_busy": busy}
    savers = Savers(every_n_train_steps=1, save_top_k=1, monitor="step", mode="max", filename="{step}")
    case = replace(CASE, folder=str(tmp_path), strategy=strategy, callbacks=savers, trainer={"max_steps": 5})
    run_ranks(slow_writes, 2, case, process_group=False, timeout=120)
    left = {each.name for each in committed(tmp_path)}
    assert not search(tmp_path).skipped
    newest = search(tmp_path).path
    assert newest is not None
    assert read_meta(newest)["global_step"] == 5  # at the end the last save is finished, and the end itself is saved
    assert left == ({"step=5.ckpt"} if busy == "wait" else {"step=1.ckpt", STOP_NAME}), "the only one written is not replaced"


class FakeSlurm(SLURMEnvironment):
    """Slurm's word for requeueing, on ranks that the test started."""

    def __init__(self) -> None:
        super().__init__(auto_requeue=True)

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """One node."""

    @property
    def main_address(self) -> str:
        return "127.0.0.1"

    @property
    def main_port(self) -> int:
        return int(os.environ["MASTER_PORT"])

    def world_size(self) -> int:
        return int(os.environ["WORLD_SIZE"])

    def global_rank(self) -> int:
        return int(os.environ["RANK"])

    def local_rank(self) -> int:
        return int(os.environ["RANK"])

    def node_rank(self) -> int:
        return 0


def stopped_under_slurm(case: Resumed) -> str:
    slurm = {"SLURM_JOB_ID": "77", "SLURM_ARRAY_JOB_ID": "70", "SLURM_ARRAY_TASK_ID": "3"}
    before = dict(os.environ)
    os.environ.update(slurm, PATH=f"{case.folder}:{os.environ['PATH']}")
    saver = ModelCheckpoint(dirpath=os.path.join(case.folder, "steps"), every_n_train_steps=1)  # this step is saved already
    interrupter = replace(case, callbacks=lambda _: [Interrupter(signal.SIGUSR1, 1, batch=3), saver])
    try:
        run_here(replace(interrupter, strategy={"cluster_environment": FakeSlurm()}))
    except StoppedBySignal as stop:
        return str(stop)
    finally:
        os.environ.clear()
        os.environ.update(before)
    return ""


def test_slurms_requeue_comes_once_and_after_the_save(tmp_path: Path) -> None:
    fake = tmp_path / "scontrol"
    fake.write_text(
        f'#!/bin/sh\necho "$@" >> {tmp_path}/called\nls {tmp_path}/hpc_ckpt_1.ckpt/manifest.json >> {tmp_path}/called\n'
    )
    fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
    case = replace(CASE, folder=str(tmp_path), trainer={"default_root_dir": str(tmp_path), "max_epochs": 2})
    straight = run(case, 2)
    left = run_ranks(stopped_under_slurm, 2, case, process_group=False)
    assert all(text.endswith("hpc_ckpt_1.ckpt") and "SIGUSR1 after step 4" in text for text in left)
    called = (tmp_path / "called").read_text().splitlines()
    assert called == ["requeue 70_3", f"{tmp_path}/hpc_ckpt_1.ckpt/manifest.json"]
    again = run(replace(case, checkpoint="hpc"), 2)
    assert [record["events"] for record in again] == after_step(straight, 4)
