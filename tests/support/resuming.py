"""A run that tells everything that happens in it and saves at chosen moments; the same run again, from one of its checkpoints."""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import random
import warnings
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy
import torch
import torch.nn.functional as F
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau
from torch.utils.data import DataLoader, Dataset

from hybrid_strategy import HybridParallelStrategy
from hybrid_strategy.models.gpt import PART as GPT
from tests.support.ranks import run_ranks
from tests.support.training import assemble

SHAPE = replace(GPT.tiny, num_layers=4)
Event = tuple[Any, ...]


class Numbered(Dataset[dict[str, torch.Tensor]]):
    """Token rows that carry their number; with `draws` each is changed at random whenever it is read."""

    def __init__(self, rows: int, draws: bool = False) -> None:
        self.draws = draws
        size = (rows, SHAPE.sequence_length + 1)
        self.rows = torch.randint(0, SHAPE.vocab_size, size, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = self.rows[index]
        if self.draws:
            row = row.roll(random.randrange(9) + numpy.random.randint(9))[torch.randperm(len(row))]
        return {"index": torch.tensor(index), "input_ids": row[:-1], "labels": row[1:]}


class DroppingLM(pl.LightningModule):
    """Dropout, two parameter groups, a schedule by steps and, if asked for, one that watches the validation loss."""

    def __init__(self, dropout: float = 0.1, plateau: str | None = None, decay: bool = True) -> None:
        super().__init__()
        self.dropout, self.plateau, self.decay = dropout, plateau, decay
        self.model: torch.nn.Module | None = None

    def configure_model(self) -> None:
        if self.model is None:
            with torch.device("meta"):
                self.model = GPT.build(SHAPE, dropout=self.dropout)

    def loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return F.cross_entropy(self.model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        for each in self.trainer.callbacks if self.trainer.training else ():
            if isinstance(each, Diary):
                each.on_batch_at_hand(self.trainer)
        return batch

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        matrices = [each for each in self.parameters() if each.ndim > 1]
        vectors = [each for each in self.parameters() if each.ndim < 2]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0, "lr": 2e-3}]
        optimizer = torch.optim.AdamW([each for each in groups if each["params"]], lr=1e-3)
        if self.plateau is not None:
            scheduler = ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=10.0)  # every look at it halves the rate
            settings = {"scheduler": scheduler, "monitor": "val_loss", "interval": self.plateau, "strict": False}
            return {"optimizer": optimizer, "lr_scheduler": settings}
        schedule = LambdaLR(optimizer, lambda step: min(1.0, 0.2 * (step + 1)) * 0.99**step)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Diary(pl.Callback):
    """Writes down what happens and saves at the moments asked for.

    Args:
        moments: name -> (hook, epoch, batch) of a checkpoint to write.
        folder: where.
    """

    def __init__(self, moments: dict[str, tuple[str, int, int]], folder: str) -> None:
        self.moments, self.folder = moments, folder
        self.events: list[Event] = []
        self.marks: dict[str, int] = {}
        self.finished_windows = 0

    def _save(self, trainer: pl.Trainer, hook: str, batch: int = -1) -> None:
        for name, moment in self.moments.items():
            if name not in self.marks and moment == (hook, trainer.current_epoch, batch):
                trainer.save_checkpoint(os.path.join(self.folder, name))
                self.marks[name] = self.finished_windows

    def _wrote(self, *event: Any, ends_window: bool = True) -> None:
        self.events.append(event)
        if ends_window:
            self.finished_windows = len(self.events)

    def on_train_epoch_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self._save(trainer, "epoch_start")
        self._wrote("epoch_start", trainer.current_epoch, ends_window=False)

    def on_batch_at_hand(self, trainer: pl.Trainer) -> None:
        self._save(trainer, "at_hand", trainer.fit_loop.epoch_loop.batch_idx + 1)

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, index: int) -> None:
        self._save(trainer, "batch_start", index)

    def on_after_backward(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self._save(trainer, "after_backward", trainer.fit_loop.epoch_loop.batch_idx)

    def on_before_optimizer_step(self, trainer: pl.Trainer, module: pl.LightningModule, optimizer: Any) -> None:
        self._save(trainer, "before_step", trainer.fit_loop.epoch_loop.batch_idx)

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, batch: Any, index: int) -> None:
        rates = [group["lr"] for group in trainer.optimizers[0].param_groups]
        numbers = batch["index"].tolist()
        progress = trainer.fit_loop.epoch_loop
        ends = not progress._should_accumulate()
        stepped = progress._batches_that_stepped
        counts = trainer.current_epoch, index, trainer.global_step, stepped
        self._wrote("batch", *counts, numbers, outputs["loss"].item(), rates, ends_window=ends)
        self._save(trainer, "batch_end", index)

    def on_validation_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *arguments: Any) -> None:
        if not trainer.sanity_checking:
            self._save(trainer, "validation_batch_end", arguments[2])

    def on_validation_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if not trainer.sanity_checking:
            ends = not trainer.fit_loop.epoch_loop._should_accumulate()
            self._wrote("validation", trainer.global_step, trainer.callback_metrics["val_loss"].item(), ends_window=ends)
            self._save(trainer, "validation_end", trainer.fit_loop.epoch_loop.batch_idx)

    def on_train_epoch_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self._wrote("epoch_end", trainer.current_epoch)
        self._save(trainer, "epoch_end")

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        for name, moment in self.moments.items():
            if moment[0] == "train_end":
                trainer.save_checkpoint(os.path.join(self.folder, name))


@dataclass
class Resumed:
    """One run. `batch_size` is that of a data-parallel rank."""

    folder: str
    strategy: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    module: dict[str, Any] = field(default_factory=dict)
    module_class: Any = DroppingLM
    moments: dict[str, tuple[str, int, int]] = field(default_factory=dict)
    rows: int = 24
    batch_size: int = 4
    num_workers: int = 0
    draws: bool = False
    shuffle: bool = True
    checkpoint: str | None = None
    callbacks: Any = None


def run_here(case: Resumed) -> dict[str, Any]:
    """Runs in the processes that are joined already; returns this rank's diary and last weights."""
    os.environ["PL_GLOBAL_SEED"] = "3"
    torch.manual_seed(5)  # as seed_everything does: the ranks start with the same random state
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # loaders may have workers
    diary = Diary(case.moments, case.folder)
    extra = case.callbacks(case) if case.callbacks else []
    options = {
        "max_epochs": 2,
        "logger": False,
        "enable_checkpointing": bool(extra),
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "limit_val_batches": 2,
        **case.trainer,
    }
    workers = {"num_workers": case.num_workers, "persistent_workers": case.num_workers > 0}
    data = Numbered(case.rows, case.draws)
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=int(os.environ.get("WORLD_SIZE", "1")),
            strategy=HybridParallelStrategy(**case.strategy),
            callbacks=[diary, *extra],
            **options,
        )
        loader = DataLoader(data, batch_size=case.batch_size, shuffle=case.shuffle, **workers)
        named = case.checkpoint is None or case.checkpoint in WORDS
        checkpoint = case.checkpoint if named else os.path.join(case.folder, str(case.checkpoint))
        trainer.fit(case.module_class(**case.module), loader, DataLoader(data, batch_size=case.batch_size), ckpt_path=checkpoint)
    made = trainer.strategy.made
    weights = {s.name: (s.shard_spec, made.sharding.optimizer_parameter(s).detach().clone()) for s in made.slots}
    return {
        "events": diary.events,
        "marks": diary.marks,
        "weights": weights,
        "epoch": trainer.current_epoch,
        "extra": extra_state(extra),
    }


WORDS = ("last", "best", "hpc")


def extra_state(callbacks: list[Any]) -> dict[str, Any]:
    """What callbacks would save, without their paths' folders."""
    return {each.state_key: {key: _short(value) for key, value in each.state_dict().items()} for each in callbacks}


def _short(value: Any) -> Any:
    if isinstance(value, dict):
        return {_short(key): _short(each) for key, each in value.items()}
    return (
        Path(value).name
        if isinstance(value, str) and "/" in value
        else (value.item() if isinstance(value, torch.Tensor) else value)
    )


def run(case: Resumed, world_size: int = 1, timeout: float = 120) -> list[dict[str, Any]]:
    """The records of all ranks."""
    return run_ranks(run_here, world_size, case, timeout=timeout, process_group=False)


def rest_after(records: list[dict[str, Any]], name: str) -> list[list[Event]]:
    """What each rank of the uninterrupted run did after the checkpoint `name`."""
    return [record["events"][record["marks"][name] :] for record in records]


def last_weights(records: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    return assemble(records, lambda record: record["weights"])


def assert_same_end(first: list[dict[str, Any]], second: list[dict[str, Any]]) -> None:
    """Not a bit of a weight differs."""
    one, other = last_weights(first), last_weights(second)
    assert one.keys() == other.keys()
    different = [name for name, value in one.items() if not torch.equal(value, other[name])]
    assert not different
