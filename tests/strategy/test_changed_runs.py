"""A run that goes on with something else than the saved one: nothing is lost, exchanged or repeated without a word."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, EMAWeightAveraging, ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR, StepLR
from torch.utils.data import DataLoader, Dataset

from hybrid_strategy import HybridParallelStrategy
from hybrid_strategy.checkpoint.loading import saved_names
from hybrid_strategy.errors import CheckpointError
from tests.support.ranks import run_ranks


class _Rows(Dataset[tuple[int, torch.Tensor]]):
    def __init__(self, size: int) -> None:
        self.values = torch.randn(size, 4, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, self.values[index]


class Toy(pl.LightningModule):
    """Two layers, a number and a count of calls; keeps what it has seen."""

    def __init__(self, optimizer: Callable[[Any], Optimizer] | None = None, schedule: Any = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.register_buffer("calls", torch.tensor(0.0))
        self.optimizer, self.schedule = optimizer or (lambda parameters: AdamW(parameters, lr=1e-2)), schedule
        self.losses: list[float] = []
        self.start: dict[str, torch.Tensor] = {}

    def on_train_start(self) -> None:
        self.start = {name: value.detach().clone() for name, value in self.state_dict().items() if torch.is_tensor(value)}

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.calls += 1
        values = batch[1].to(self.scale.dtype)
        loss = (self.net(values) * self.scale - values).pow(2).mean()
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.net(batch[1])

    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer(list(self.parameters()))
        return (
            optimizer if self.schedule is None else ([optimizer], [{"scheduler": self.schedule(optimizer), "interval": "step"}])
        )


class TwoOptimizers(Toy):
    """Both hold every parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for number, optimizer in enumerate(self.optimizers(), 1):
            optimizer.zero_grad()
            loss = (self.net(batch[1]) - number * batch[1]).pow(2).mean()
            self.manual_backward(loss)
            optimizer.step()
            self.losses.append(loss.item())

    def configure_optimizers(self) -> Any:
        return [AdamW(self.net.parameters(), lr=1e-2), AdamW(self.net.parameters(), lr=1e-3)]


def _fit(
    module: pl.LightningModule, steps: int, path: str | None = None, *, rows: int = 32, shuffle: bool = True, **options: Any
) -> tuple[pl.Trainer, str]:
    """Trains; returns the Trainer and all that was said."""
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    val: Any = options.pop("val", None)
    data: Any = options.pop("data", None) or DataLoader(_Rows(rows), batch_size=4, shuffle=shuffle)
    settings = {"strategy": HybridParallelStrategy(), **quiet, **options}
    said = io.StringIO()
    listener, log = logging.StreamHandler(said), logging.getLogger("lightning.pytorch")
    log.addHandler(listener)
    try:
        with warnings.catch_warnings(record=True) as caught, contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("always")
            trainer = pl.Trainer(accelerator="cpu", devices=1, max_steps=steps, **settings)
            trainer.fit(module, data, val, ckpt_path=path)
    finally:
        log.removeHandler(listener)
    return trainer, said.getvalue() + "".join(str(each.message) for each in caught)


def _saved(folder: str, module: pl.LightningModule | None = None, **options: Any) -> str:
    path = os.path.join(folder, "saved")
    _fit(module or Toy(), 4, **options)[0].save_checkpoint(path)
    return path


def _with_another_seed(folder: str) -> dict[str, str]:
    os.environ["PL_GLOBAL_SEED"] = "3"
    mixed, plain = _saved(folder), _saved(os.path.join(folder, "plain"), shuffle=False)
    said = {"same": _fit(Toy(), 8, mixed)[1], "longer": _fit(Toy(), 8, mixed, rows=48)[1]}
    os.environ["PL_GLOBAL_SEED"] = "4"
    said |= {"seed": _fit(Toy(), 8, mixed)[1], "no shuffle": _fit(Toy(), 8, mixed, shuffle=False)[1]}
    return said | {"plain": _fit(Toy(), 8, plain, rows=48, shuffle=False)[1]}


def test_another_order_of_the_samples_is_told(tmp_path: Path) -> None:
    """Also one that does not matter is known: samples added behind those that are read in order."""
    said = run_ranks(_with_another_seed, 1, str(tmp_path), process_group=False)[0]
    told = {name: "order of the samples is" in text for name, text in said.items()}
    assert told == {"same": False, "longer": True, "seed": True, "no shuffle": True, "plain": False}
    assert "'shuffled, 32 samples, seed 4'" in said["seed"]
    assert "'shuffled, 32 samples, seed 3'" in said["seed"]


def _sgd(parameters: Any) -> Optimizer:
    return SGD(parameters, lr=0.1, momentum=0.9)


def _in_groups(parameters: Any) -> Optimizer:
    return AdamW([{"params": parameters[:2], "weight_decay": 0.1}, {"params": parameters[2:], "weight_decay": 0.2}], lr=1e-2)


def _with_another_optimizer(folder: str) -> tuple[str, str, str, str]:
    grouped = _fit(Toy(), 8, _saved(os.path.join(folder, "groups"), Toy(_in_groups)))[1]
    path = _saved(folder, Toy(_sgd))
    with pytest.raises(CheckpointError) as caught:
        _fit(Toy(), 8, path)
    module = Toy()
    module.strict_loading = False
    anew = _fit(module, 8, path)[1]
    overruled = _fit(Toy(lambda parameters: SGD(parameters, lr=0.2, momentum=0.5)), 8, path)[1]
    return str(caught.value), anew, overruled, grouped


def test_states_of_another_optimizer_are_not_taken(tmp_path: Path) -> None:
    refusal, anew, overruled, grouped = run_ranks(_with_another_optimizer, 1, str(tmp_path), process_group=False)[0]
    assert "NOT restored  settings of the group of " in grouped
    assert "optimizer settings" not in grouped
    assert "in place of this run's" not in grouped
    assert refusal.startswith("optimizer is 'AdamW': ")
    assert "It was SGD." in refusal
    assert "NOT restored  optimizer state of net.0.weight: it is of SGD, not of AdamW" in anew
    assert "settings in place of this run's: lr 0.1 for 0.2; momentum 0.9 for 0.5" in overruled


def _in_another_precision(folder: str) -> tuple[list[str], str]:
    found = []
    for number, pair in enumerate((("32-true", "bf16-true"), ("bf16-true", "32-true"))):
        path = _saved(os.path.join(folder, str(number)), precision=pair[0])
        trainer = _fit(Toy(), 8, path, precision=pair[1])[0]
        found += sorted({str(state["exp_avg"].dtype) for state in trainer.optimizers[0].state.values()})
    scaled = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    return found, _fit(Toy(), 8, os.path.join(folder, "0", "saved"), plugins=[scaled])[1]


def test_states_follow_their_weights_into_another_precision(tmp_path: Path) -> None:
    dtypes, said = run_ranks(_in_another_precision, 1, str(tmp_path), process_group=False)[0]
    assert dtypes == ["torch.bfloat16", "torch.float32"]
    assert "NOT restored  loss scaler: the saved run had none; it begins anew" in said


def _of_two_optimizers(folder: str) -> tuple[list[float], list[float], set[str]]:
    whole, first, rest = TwoOptimizers(), TwoOptimizers(), TwoOptimizers()
    _fit(whole, 16)
    path = os.path.join(folder, "saved")
    _fit(first, 8)[0].save_checkpoint(path)
    _fit(rest, 16, path)
    return whole.losses, first.losses + rest.losses, set(saved_names(path))


def test_a_parameter_of_two_optimizers_has_two_states(tmp_path: Path) -> None:
    whole, parts, names = run_ranks(_of_two_optimizers, 1, str(tmp_path), process_group=False)[0]
    assert parts == whole
    assert {"optimizer.net.0.weight.exp_avg", "optimizer.net.0.weight.exp_avg@1"} <= names


class Counting(nn.Module):
    """Counts its calls, in a state that is neither parameter nor buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return values

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


class Rows(pl.LightningDataModule):
    def train_dataloader(self) -> Any:
        return DataLoader(_Rows(32), batch_size=4)

    def state_dict(self) -> dict[str, int]:
        return {"read": 1}


class SavesInTheMiddle(pl.Callback):
    """Of a validation, while the model holds the average of the weights."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_validation_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *arguments: Any) -> None:
        if trainer.global_step == 2:
            trainer.save_checkpoint(self.path)


def _without_the_average(folder: str) -> tuple[list[bool], str, str]:
    path = os.path.join(folder, "saved")
    averaging = EMAWeightAveraging(decay=0.9, use_buffers=True)
    rows = DataLoader(_Rows(4), batch_size=4)
    _fit(Toy(), 4, val=rows, val_check_interval=2, num_sanity_val_steps=0, callbacks=[averaging, SavesInTheMiddle(path)])
    plain, without = Toy(), Toy()
    plain_path = os.path.join(folder, "plain")
    _fit(plain, 2)[0].save_checkpoint(plain_path)
    said = _fit(without, 4, path)[1]
    other = _fit(Toy(), 4, plain_path, callbacks=[EMAWeightAveraging(decay=0.9)])[1]
    return [torch.equal(plain.state_dict()[name], value) for name, value in without.start.items()], said, other


def test_training_goes_on_with_trained_weights_where_the_average_is_left_out(tmp_path: Path) -> None:
    equal, said, other = run_ranks(_without_the_average, 1, str(tmp_path), process_group=False)[0]
    assert equal == [True] * 6
    assert "NOT restored  weight average: this run has none" in said
    assert "NOT restored  weight average: the saved run had none" in other


def _with_parts_of_its_own(folder: str) -> tuple[int, str, str, str]:
    module, data = Toy(), Rows()
    module.net.append(Counting())
    path = os.path.join(folder, "saved")
    _fit(module, 4, data=data)[0].save_checkpoint(path)
    again = Toy()
    again.net.append(Counting())
    trainer, said = _fit(again, 6, path, callbacks=[EarlyStopping("loss", strict=False)])
    trainer.save_checkpoint(path)
    patient = _fit(again, 6, path, callbacks=[EarlyStopping("loss", strict=False, patience=9)])[1]
    return again.net[-1].calls, said, patient, _fit(Toy(schedule=lambda each: StepLR(each, 2)), 6, path)[1]


def test_parts_of_the_state_come_back_or_are_named(tmp_path: Path) -> None:
    calls, said, patient, scheduled = run_ranks(_with_parts_of_its_own, 1, str(tmp_path), process_group=False)[0]
    assert calls == 6
    assert "NOT restored  Rows: nothing in this run takes it back" in said
    assert "NOT restored  callback EarlyStopping{'monitor': 'loss', 'mode': 'min'}: the saved run had none" in said
    assert "settings in place of this run's: patience of EarlyStopping 3 for 9" in patient
    assert "NOT restored  learning-rate schedules: the checkpoint has 0, this run has 1" in scheduled


def _warmed_up(steps: int, whole: int) -> Callable[[Optimizer], Any]:
    return lambda each: SequentialLR(each, [LinearLR(each, 0.1, total_iters=2), CosineAnnealingLR(each, whole)], [steps])


def _with_another_schedule(folder: str) -> tuple[str, str, str, str, str]:
    path = _saved(folder, Toy(schedule=lambda each: StepLR(each, 2)))
    longer = _fit(Toy(schedule=lambda each: StepLR(each, 3)), 6, path)[1]
    other = _fit(Toy(schedule=lambda each: CosineAnnealingLR(each, 8)), 6, path)[1]
    joined = _saved(os.path.join(folder, "joined"), Toy(schedule=_warmed_up(2, 20)))
    inner = _fit(Toy(schedule=_warmed_up(3, 30)), 6, joined)[1]
    exchanged = _fit(Toy(schedule=lambda each: SequentialLR(each, [LinearLR(each), StepLR(each, 3)], [2])), 6, joined)[1]
    with pytest.raises(CheckpointError) as caught:
        _fit(Toy(schedule=_warmed_up(2, 20)), 6, path)
    return longer, other, inner, exchanged, str(caught.value)


def test_another_schedule_is_told(tmp_path: Path) -> None:
    longer, other, inner, exchanged, refused = run_ranks(_with_another_schedule, 1, str(tmp_path), process_group=False)[0]
    assert "settings in place of this run's: T_max 20 for 30; milestones [2] for [3]" in inner
    assert "settings in place of this run's: step_size 2 for 3" in longer
    assert "NOT restored  learning-rate schedule: it was StepLR; CosineAnnealingLR takes over" in other
    assert "it was SequentialLR(LinearLR, CosineAnnealingLR); SequentialLR(LinearLR, StepLR) takes over" in exchanged
    assert "NOT restored  learning-rate schedule" not in inner
    assert refused.startswith("learning-rate schedule is 'SequentialLR': the checkpoint's is not made of these schedules")


def _to_a_store(folder: str) -> str:
    os.chdir(folder)
    trainer = _fit(Toy(), 2)[0]
    with mock.patch.dict(os.environ, HOME=folder):
        trainer.save_checkpoint("~/saved")
        _fit(Toy(), 3, "~/saved")
    with pytest.raises(CheckpointError) as caught:
        trainer.save_checkpoint("s3://bucket/name.ckpt")
    return str(caught.value)


def test_an_address_is_no_local_folder(tmp_path: Path) -> None:
    text = run_ranks(_to_a_store, 1, str(tmp_path), process_group=False)[0]
    assert text.startswith("checkpoint is 's3://bucket/name.ckpt': ")
    assert {each.name for each in tmp_path.iterdir()} == {"saved", "last"}


def _saved_in_the_background(folder: str) -> None:
    keeper = ModelCheckpoint(folder, "best", monitor="step", mode="max", every_n_train_steps=1, save_top_k=3)
    options = {"strategy": HybridParallelStrategy(asynchronous_checkpoint=True), "enable_checkpointing": True}
    _fit(Toy(), 3, callbacks=[keeper], **options)


def test_a_name_that_is_being_written_is_taken(tmp_path: Path) -> None:
    run_ranks(_saved_in_the_background, 1, str(tmp_path), process_group=False)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["best-v1.ckpt", "best-v2.ckpt", "best.ckpt", "last"]
