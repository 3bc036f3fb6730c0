"""Point 1, outside of steps: `self.log` in hooks and callbacks, by all ranks or some."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torchmetrics import MeanMetric, MetricCollection, MetricTracker, MinMaxMetric, SumMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from tests.contract.items import Item
from tests.contract.layouts import ContractLayout
from tests.contract.logging_items import Memory, Seen
from tests.contract.models import VOCAB, Module, loader, make_trainer, row_losses


class HookLogging(Module):
    """A name in every hook that may log."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        losses = row_losses(self.model(batch["ids"]), batch["labels"])
        return {"loss": losses.mean(), "losses": losses, "hardest": losses.detach().mean()}

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        return row_losses(self.model(batch["ids"]), batch["labels"]).mean()

    def on_train_start(self) -> None:
        self.log("start", 1.0)

    def on_train_epoch_start(self) -> None:
        self.log("epoch_start", float(self.current_epoch))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.log("batch_start", float(batch_idx), prog_bar=True)

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.log("zero_grad", float(self.global_step), on_epoch=True)

    def on_before_backward(self, loss: Tensor) -> None:
        self.log("before_backward", loss, on_step=True, on_epoch=True)

    def on_after_backward(self) -> None:
        self.log("after_backward", 2.0)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log("before_step", optimizer.param_groups[0]["lr"])

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("batch_end", outputs["losses"].mean(), on_step=True, on_epoch=True, batch_size=len(outputs["losses"]))
        self.log("batch_end_rows", float(len(batch["ids"])), reduce_fx="sum", sync_dist=True, on_epoch=True)
        self.log("batch_end_max", outputs["losses"].max(), reduce_fx="max", on_step=True, on_epoch=True)

    def on_train_epoch_end(self) -> None:
        self.log("epoch_end", float(self.current_epoch) + 0.5, prog_bar=True)

    def on_validation_epoch_start(self) -> None:
        self.log("val_start", 3.0)

    def on_validation_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.log("val_batch_start", float(batch_idx), on_step=True, on_epoch=True)

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("val_batch_end", outputs, batch_size=len(batch["ids"]))

    def on_validation_epoch_end(self) -> None:
        self.log("val_end", 4.0)


class LoggingCallback(pl.Callback):
    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, batch: Any, index: int) -> None:
        self.log("from_callback", float(outputs["loss"]), on_epoch=True)
        self.log_dict({"from_callback_too": 1.0})

    def on_validation_epoch_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        module.log("val_from_callback", 5.0)


def hooks(layout: ContractLayout, folder: str) -> Any:
    memory, seen = Memory(), Seen()
    trainer = make_trainer(layout, max_epochs=2, logger=memory, callbacks=[LoggingCallback(), seen], num_sanity_val_steps=1)
    trainer.fit(HookLogging(), loader(layout, 21), loader(layout, 16, seed=2))
    return {"logged": memory.lines, "seen": seen.seen}


class PartialLogging(Module):
    """Some names are logged only where a value is at hand: on the last stage, on one data-parallel rank, now and then."""

    kept: Tensor | None = None

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        losses = row_losses(self.model(batch["ids"]), batch["labels"])
        self.kept = losses.detach().mean() * 0 + 7.0
        if batch["row"].min() % 8 == 0:
            self.log("first_rows_only", 1.5, sync_dist=True)
        if batch["row"].max() % 8 == 7:
            self.log("last_rows_only", 2.5, sync_dist=True)
        self.log("rank_zero", 3.0, rank_zero_only=True)
        return losses.mean()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.kept is not None and batch_idx % 2 == 0:
            self.log("kept", self.kept)
        if self.trainer.is_global_zero:
            self.log("even", 10.0, sync_dist=True)
        if self.trainer.global_rank == self.trainer.world_size - 1:
            self.log("odd", 20.0, sync_dist=True)

    def on_train_epoch_end(self) -> None:
        if self.kept is not None:
            self.log("kept_at_end", self.kept + 1.0)


def partial(layout: ContractLayout, folder: str) -> Any:
    memory, seen = Memory(), Seen()
    trainer = make_trainer(layout, max_epochs=2, logger=memory, callbacks=[seen])
    trainer.fit(PartialLogging(), loader(layout, 24))
    return {"logged": memory.lines, "seen": seen.seen}


class Counting(Module):
    """Metric objects in every form."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = MulticlassAccuracy(VOCAB, average="micro", ignore_index=-100)
        self.f1 = MulticlassF1Score(VOCAB, average="macro", ignore_index=-100)
        self.rows = SumMetric()
        self.val = MetricCollection(
            {"accuracy": MulticlassAccuracy(VOCAB, ignore_index=-100), "f1": MulticlassF1Score(VOCAB, ignore_index=-100)},
            prefix="val/",
        )
        self.val_loss = MeanMetric()
        self.by_hand = MulticlassF1Score(VOCAB, average="macro", ignore_index=-100)
        self.in_a_dict = {"rows": SumMetric()}
        self.span = MinMaxMetric(MulticlassAccuracy(VOCAB, average="micro", ignore_index=-100))  # computes another one
        self.tracked = MetricTracker(SumMetric(), maximize=True)  # makes a new one in each epoch

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        logits = self.model(batch["ids"])
        found = logits.argmax(-1)
        self.accuracy(found, batch["labels"])
        self.f1(found, batch["labels"])
        self.rows.update(batch["row"].numel())
        self.log("accuracy", self.accuracy)
        self.log("f1", self.f1, on_step=True, on_epoch=True, prog_bar=True)
        self.log("rows", self.rows, on_step=False, on_epoch=True)
        return row_losses(logits, batch["labels"]).mean()

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        logits = self.model(batch["ids"])
        self.val.update(logits.argmax(-1), batch["labels"])
        self.by_hand.update(logits.argmax(-1), batch["labels"])
        self.in_a_dict["rows"].update(len(logits))
        self.span.update(logits.argmax(-1), batch["labels"])
        self.tracked.update(len(logits))
        losses = row_losses(logits, batch["labels"])
        self.val_loss.update(losses)
        self.log_dict(self.val)
        self.log("val/loss", self.val_loss)

    def on_validation_epoch_start(self) -> None:
        self.tracked.increment()

    def on_validation_epoch_end(self) -> None:
        self.log_dict({f"val/span_{name}": value for name, value in self.span.compute().items()})
        self.log("val/tracked", self.tracked.compute())
        self.span.reset()
        self.log("val/by_hand", self.by_hand.compute())
        self.by_hand.reset()
        self.log("val/rows", self.in_a_dict["rows"].compute())
        self.in_a_dict["rows"].reset()


class Tally(pl.Callback):
    """Has a metric of its own."""

    def __init__(self) -> None:
        self.rows = SumMetric()

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, batch: Any, index: int) -> None:
        self.rows.update(len(batch["row"]))

    def on_train_epoch_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        module.log("tally", self.rows.compute())
        self.rows.reset()


def metrics(layout: ContractLayout, folder: str) -> Any:
    memory, seen = Memory(), Seen()
    trainer = make_trainer(layout, max_epochs=2, logger=memory, callbacks=[Tally(), seen], num_sanity_val_steps=1)
    module = Counting()
    trainer.fit(module, loader(layout, 21), loader(layout, 17, seed=2))
    again = trainer.validate(module, loader(layout, 17, seed=2), verbose=False)
    return {"logged": memory.lines, "seen": seen.seen, "again": again}


class Monitored(Counting):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=2.0)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, mode="max")
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val/f1"}}


def monitors(layout: ContractLayout, folder: str) -> Any:
    from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint

    memory = Memory()
    stop = EarlyStopping("val/loss", patience=2, min_delta=0.01)
    best = ModelCheckpoint(folder, monitor="val/f1", mode="max", save_top_k=2, filename="{epoch}-{step}", save_last=True)
    train = ModelCheckpoint(f"{folder}/train", monitor="f1_epoch", mode="max", filename="{epoch}", save_on_train_epoch_end=True)
    callbacks = [stop, best, train, LearningRateMonitor()]
    trainer = make_trainer(layout, max_epochs=8, logger=memory, callbacks=callbacks, enable_checkpointing=True)
    trainer.fit(Monitored(), loader(layout, 21), loader(layout, 17, seed=2))
    names = [path.rsplit("/", 1)[-1] for path in best.best_k_models]
    scores = [float(score) for score in best.best_k_models.values()]
    rates = [line["lr-SGD"] for _, line in memory.lines if "lr-SGD" in line]
    return {
        "stopped": (stop.stopped_epoch, trainer.current_epoch, trainer.global_step),
        "best": (names, scores, best.best_model_path.rsplit("/", 1)[-1], float(best.best_model_score)),
        "train": (train.best_model_path.rsplit("/", 1)[-1], float(train.best_model_score)),
        "rates": rates,
    }


ITEMS = [
    Item("log_in_hooks", 1, hooks),
    Item("log_on_some_ranks", 1, partial),
    Item("metric_objects", 1, metrics),
    Item("monitors", 1, monitors),
]
