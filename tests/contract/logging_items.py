"""Point 1: `self.log` in every hook where Lightning allows it, with every option."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers.logger import Logger
from torch import Tensor

from tests.contract.items import Item
from tests.contract.layouts import ContractLayout
from tests.contract.models import LENGTH, Module, loader, make_trainer, row_losses


class Memory(Logger):
    """Keeps what it is told, on every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[int | None, dict[str, float]]] = []

    @property
    def name(self) -> str:
        return "memory"

    @property
    def version(self) -> str:
        return "0"

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.lines.append((step, dict(metrics)))

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        pass


def numbers(metrics: dict[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items()}


class Seen(pl.Callback):
    """The last callback: what the trainer shows after each batch and epoch."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def note(self, where: str, trainer: pl.Trainer) -> None:
        shown = (trainer.callback_metrics, trainer.logged_metrics, trainer.progress_bar_metrics)
        self.seen.append((where, *(numbers(each) for each in shown)))

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.note("train batch", trainer)

    def on_validation_epoch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.note("validation epoch", trainer)

    def on_validation_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.note("validation", trainer)

    def on_train_epoch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.note("train epoch", trainer)


class StepLogging(Module):
    """Every option, in the steps."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        logits = self.model(batch["ids"])
        losses = row_losses(logits, batch["labels"])
        loss = losses.mean()
        self.log("loss", loss, prog_bar=True)
        self.log("loss_epoch_only", loss, on_step=False, on_epoch=True)
        self.log("both", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log("rows", float(len(losses)), reduce_fx="sum", on_step=True, on_epoch=True)
        self.log("hardest", losses.max(), reduce_fx="max", on_step=True, on_epoch=True)
        self.log("easiest", losses.min(), reduce_fx=torch.min, on_step=False, on_epoch=True, prog_bar=True)
        valid = (batch["labels"] != -100).sum()
        per_token = losses.sum() * LENGTH / valid
        self.log("weighted", per_token, batch_size=int(valid), on_step=True, on_epoch=True, sync_dist=True)
        self.log("half", losses.mean().to(torch.bfloat16).float() * 0 + 0.5, logger=False)
        self.log("integer", torch.tensor(3), on_epoch=True)
        self.log_dict({"a": loss * 2, "b": losses.square().mean()}, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        losses = row_losses(self.model(batch["ids"]), batch["labels"])
        self.log("val", losses.mean())
        self.log("val_all", losses.mean(), add_dataloader_idx=False) if dataloader_idx == 0 else None
        self.log("val_sum", losses.sum(), reduce_fx="sum", on_step=True, on_epoch=True)
        if batch_idx % 2 == 0:
            self.log("now_and_then", losses.max(), reduce_fx="max")


def steps(layout: ContractLayout, folder: str) -> Any:
    memory, seen = Memory(), Seen()
    trainer = make_trainer(layout, max_epochs=2, logger=memory, callbacks=[seen])
    trainer.fit(StepLogging(), loader(layout, 21), [loader(layout, 17, seed=2), loader(layout, 12, seed=3)])
    validated = trainer.validate(StepLogging(), loader(layout, 17, seed=2), verbose=False)
    return {"logged": memory.lines, "seen": seen.seen, "validated": validated}


ITEMS = [Item("log_in_steps", 1, steps)]
