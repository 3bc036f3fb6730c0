"""Point 3: hooks in Lightning's order with what one process sees, and Lightning's own callbacks."""

from __future__ import annotations

import os
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LearningRateFinder,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelSummary,
    RichProgressBar,
    StochasticWeightAveraging,
    Timer,
    TQDMProgressBar,
)
from torch import Tensor
from torch.utils.data import DataLoader

from tests.contract.items import Item
from tests.contract.layouts import LAYOUTS, ContractLayout
from tests.contract.logging_items import Memory
from tests.contract.models import VOCAB, LossRecorder, Module, Rows, loader, make_trainer, row_losses

SPLIT = [name for name, layout in LAYOUTS.items() if layout.sharded or layout.tensor_parallel or layout.pipelined]

CHANGED = [name for name, layout in LAYOUTS.items() if layout.context_parallel or (name in SPLIT and name != "dp2_zero1")]

HOOKS = [name for name in dir(pl.Callback) if name.startswith("on_") and name not in ("on_exception",)]
MODULE_HOOKS = [name for name in dir(pl.LightningModule) if name.startswith("on_") and hasattr(pl.LightningModule, name)]
QUIET = ("on_gpu", "on_tpu", "on_before_batch_transfer", "on_after_batch_transfer")


def _note(seen: list[str], who: str, hook: str) -> Any:
    def note(*arguments: Any, **options: Any) -> None:
        words = [type(each).__name__ if not isinstance(each, (int, float)) else repr(each) for each in arguments]
        named = [word for word in words if word in ("int", "dict") or word.isdigit()]
        seen.append(f"{who}.{hook}({', '.join(named)}) of {len(arguments)}")

    return note


def order(layout: ContractLayout, folder: str) -> Any:
    """Every hook of a callback and of the module, through all four functions of the Trainer."""
    seen: list[str] = []
    callback, module = pl.Callback(), Module()
    for hook in HOOKS:
        setattr(callback, hook, _note(seen, "callback", hook))
    for hook in MODULE_HOOKS:
        if (hook not in QUIET and not hook.endswith(("model_train", "model_eval", "zero_grad"))) or hook == "on_before_zero_grad":
            object.__setattr__(module, hook, _note(seen, "module", hook))
    module.validation_step = module.test_step = lambda batch, batch_idx: module.loss(batch)
    module.predict_step = lambda batch, batch_idx: module.model(batch["ids"])
    trainer = make_trainer(layout, max_epochs=2, callbacks=[callback], accumulate_grad_batches=2, num_sanity_val_steps=1)
    trainer.fit(module, loader(layout, 21), loader(layout, 9, seed=2))
    for run in (trainer.validate, trainer.test, trainer.predict):
        run(module, loader(layout, 9, seed=2), **({} if run == trainer.predict else {"verbose": False}))
    return {"seen": seen}


class Overriding(Module):
    """A module that has taken over what Lightning lets it take over."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return {**batch, "ids": (batch["ids"] + 1) % VOCAB}

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return {**batch, "weights": 1.0 + batch["row"] % 3}

    def loss(self, batch: Any) -> Tensor:
        return (row_losses(self.model(batch["ids"]), batch["labels"]) * batch["weights"]).mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(batch))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.9)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5), "interval": "step"}]

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        self.seen.append(("backward", float(loss)))
        loss.backward(*args, **kwargs)

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        self.clip_gradients(optimizer, 0.5 / (1 + self.global_step), "norm" if self.global_step % 2 else "value")

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:
        optimizer.step(closure=closure)
        self.seen.append(("step", epoch, batch_idx, optimizer.param_groups[0]["lr"]))

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        self.seen.append(("zero", epoch, batch_idx))
        optimizer.zero_grad(set_to_none=False)

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        self.seen.append(("scheduler", metric))
        scheduler.step()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> Any:
        return -1 if self.current_epoch == 1 and batch_idx == 1 else None

    def on_train_batch_end(self, *_: Any) -> None:
        last = self.trainer.is_last_batch
        if self.current_epoch == 2 and self.trainer.global_rank == self.trainer.world_size - 1 and not last:
            self.trainer.should_stop = True


def overridden(layout: ContractLayout, folder: str) -> Any:
    """The module's own versions of Lightning's steps; one rank asks to stop in the third epoch."""
    module, losses = Overriding(), LossRecorder()
    trainer = make_trainer(layout, max_epochs=5, callbacks=[losses])
    trainer.fit(module, loader(layout, 24), loader(layout, 9, seed=2))
    numbers = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return {"seen": module.seen, "losses": losses.losses, "end": (trainer.current_epoch, trainer.global_step), "numbers": numbers}


class Compiled(Module):
    def __init__(self) -> None:
        super().__init__()
        self.model.compile(backend="aot_eager")


def compiled(layout: ContractLayout, folder: str) -> Any:
    losses = LossRecorder()
    make_trainer(layout, max_epochs=2, callbacks=[losses]).fit(Compiled(), loader(layout, 24))
    return {"losses": losses.losses}


class GradientsSeen(pl.Callback):
    """The whole model's gradient norm at each hook that may look at gradients."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def note(self, hook: str, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        strategy = trainer.strategy
        if hasattr(strategy, "gradient_norm"):
            norm = float(strategy.gradient_norm())
        else:
            gradients = [each.grad for each in module.parameters() if each.grad is not None]
            norm = float(torch.nn.utils.get_total_norm(gradients)) if gradients else 0.0
        self.seen.append((hook, norm))

    def on_before_zero_grad(self, trainer: pl.Trainer, module: pl.LightningModule, optimizer: Any) -> None:
        self.note("zero_grad", trainer, module)

    def on_after_backward(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.note("backward", trainer, module)

    def on_before_optimizer_step(self, trainer: pl.Trainer, module: pl.LightningModule, optimizer: Any) -> None:
        self.note("step", trainer, module)

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        self.note("batch_end", trainer, module)


def gradients(layout: ContractLayout, folder: str) -> Any:
    callback = GradientsSeen()
    make_trainer(layout, max_epochs=2, callbacks=[callback], gradient_clip_val=0.3).fit(Module(), loader(layout, 21))
    return {"seen": callback.seen}


class Watched(Module):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train", loss, on_step=True, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val", self.loss(batch), prog_bar=True)


def files(layout: ContractLayout, folder: str) -> Any:
    """The checkpoints that lie in the folder at the end; `last`, a text file that names the newest, is the strategy's own."""
    top = ModelCheckpoint(f"{folder}/top", monitor="val", save_top_k=2, filename="{epoch}-{val:.4f}", save_last=True)
    steps = ModelCheckpoint(f"{folder}/steps", every_n_train_steps=2, save_top_k=-1, filename="{step}")
    name = "{step}-{train_step:.3f}"  # the best value, 2.27285, is on an edge of rounding to four digits
    step_best = ModelCheckpoint(f"{folder}/best", monitor="train_step", every_n_train_steps=1, filename=name)
    trainer = make_trainer(layout, max_epochs=3, callbacks=[top, steps, step_best], enable_checkpointing=True)
    trainer.fit(Watched(), loader(layout, 21), loader(layout, 9, seed=2))
    names = {name: sorted(set(os.listdir(f"{folder}/{name}")) - {"last"}) for name in ("top", "steps", "best")}
    return {"names": names, "best": os.path.basename(top.best_model_path), "score": float(top.best_model_score)}


def callbacks(layout: ContractLayout, folder: str) -> Any:
    """Accumulation by epoch, rates, a timer, progress bars: the same numbers of steps and losses."""
    memory, losses = Memory(), LossRecorder()
    found = {}
    for name, bar in (("tqdm", TQDMProgressBar()), ("rich", RichProgressBar())):
        some = [GradientAccumulationScheduler({0: 1, 1: 2}), LearningRateMonitor("step"), Timer("00:01:00:00"), losses, bar]
        trainer = make_trainer(layout, max_epochs=3, callbacks=some, logger=memory, enable_progress_bar=True)
        trainer.fit(Watched(), loader(layout, 21), loader(layout, 9, seed=2))
        found[name] = trainer.global_step
    return {"steps": found, "losses": losses.losses, "logged": memory.lines}


def summary(layout: ContractLayout, folder: str) -> Any:
    """Parameters as they are counted for the un-split model."""
    found: dict[str, Any] = {}

    class Kept(ModelSummary):
        @staticmethod
        def summarize(summary_data: Any, total: int, trainable: int, size: float, *_: Any, **__: Any) -> None:
            found.update(rows=[[str(each) for each in row] for _, row in summary_data[:3]], counts=(total, trainable, size))

    module = Module()
    module.model.embed.requires_grad_(False)
    make_trainer(layout, max_steps=1, callbacks=[Kept(max_depth=3)], enable_model_summary=True).fit(module, loader(layout, 8))
    return {"rank_zero": found}


class Unfreezing(BaseFinetuning):
    """The head trains from the start, two layers from the second epoch, the embedding from the third."""

    def freeze_before_training(self, module: pl.LightningModule) -> None:
        self.freeze([module.model.embed, module.model.layers])

    def finetune_function(self, module: pl.LightningModule, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(module.model.layers[2:].children(), optimizer, lr=0.2)
        if epoch == 2:
            self.unfreeze_and_add_param_group(module.model.embed, optimizer, lr=0.1)


class Unfrozen(Module):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([each for each in self.parameters() if each.requires_grad], lr=0.5, momentum=0.9)

    def on_train_epoch_end(self) -> None:
        self.groups.append([group["lr"] for group in self.optimizers().param_groups])


def finetuning(layout: ContractLayout, folder: str) -> Any:
    losses, module = LossRecorder(), Unfrozen()
    module.groups = []
    with torch.no_grad():  # Lightning compares parameters by value, and equal norms of two layers are one to it
        for index, each in enumerate(module.parameters()):
            each.add_(1e-3 * (index + 1))
    make_trainer(layout, max_epochs=4, callbacks=[Unfreezing(), losses]).fit(module, loader(layout, 21))
    return {"losses": losses.losses, "groups": module.groups}


def averaging(layout: ContractLayout, folder: str) -> Any:
    """An average of the weights: validated with, saved, gone on with after a restart, and left in the model at the end."""
    losses, memory = LossRecorder(), Memory()

    def trainer(epochs: int) -> pl.Trainer:
        kept = ModelCheckpoint(f"{folder}/kept", filename="{epoch}", save_top_k=-1)
        some = [EMAWeightAveraging(decay=0.7), losses, kept]
        return make_trainer(layout, max_epochs=epochs, callbacks=some, logger=memory, enable_checkpointing=True)

    trainer(2).fit(Watched(), loader(layout, 16), loader(layout, 9, seed=2))
    module = Watched()
    second = trainer(4)
    second.fit(module, loader(layout, 16), loader(layout, 9, seed=2), ckpt_path=f"{folder}/kept/epoch=1.ckpt")
    final = second.validate(module, loader(layout, 9, seed=2), verbose=False)
    return {"losses": losses.losses, "logged": memory.lines, "final": final}


def stochastic(layout: ContractLayout, folder: str) -> Any:
    losses, module = LossRecorder(), Watched()
    trainer = make_trainer(layout, max_epochs=4, callbacks=[StochasticWeightAveraging(0.1, swa_epoch_start=2), losses])
    trainer.fit(module, loader(layout, 16))
    return {"losses": losses.losses, "final": trainer.validate(module, loader(layout, 9, seed=2), verbose=False)}


class Tunable(Module):
    """Has what Lightning's tuner looks for: a rate."""

    def __init__(self, batch_size: int) -> None:
        super().__init__()
        self.lr, self.batch_size = 0.1, batch_size

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)

    def train_dataloader(self) -> Any:
        return DataLoader(Rows(64), batch_size=self.batch_size)


def tuners(layout: ContractLayout, folder: str) -> Any:
    """The finder of a rate tries, and leaves weights and counters as they were."""
    finder = LearningRateFinder(num_training_steps=10, early_stop_threshold=None, update_attr=False)
    losses, module = LossRecorder(), Tunable(layout.batch_size)
    trainer = make_trainer(layout, max_steps=3, callbacks=[finder, losses], default_root_dir=folder)
    trainer.fit(module)
    tried = finder.optimal_lr.results
    return {"losses": losses.losses, "steps": trainer.global_step, "tried": tried["lr"], "smoothed": tried["loss"]}


ITEMS = [
    Item("order_of_hooks", 3, order),
    Item("gradients_in_hooks", 3, gradients),
    Item("overridden_steps", 3, overridden),
    Item("compiled_by_the_user", 7, compiled, refused=dict.fromkeys(CHANGED, "torch.compile is")),
    Item("checkpoint_files", 3, files),
    Item("usual_callbacks", 3, callbacks),
    Item("tuners", 3, tuners),
    Item("model_summary", 3, summary),
    Item("unfreezing", 3, finetuning),
    Item("weight_averaging", 3, averaging),
    Item("stochastic_weight_averaging", 3, stochastic, refused=dict.fromkeys(SPLIT, "StochasticWeightAveraging")),
]
