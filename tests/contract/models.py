"""A small model with a plan, its data, and the Trainer that runs it in any layout."""

from __future__ import annotations

import contextlib
import io
import os
import warnings
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from hybrid_strategy import HybridParallelStrategy, ParallelPlan
from tests.contract.layouts import ContractLayout

VOCAB, HIDDEN, LENGTH = 16, 8, 12


class Block(nn.Module):
    """`[b, s, h]` -> `[b, s, h]`; each token is mixed with the mean of those before it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.mlp = nn.ModuleDict({"up": nn.Linear(HIDDEN, 12), "down": nn.Linear(12, HIDDEN)})

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(x)
        return x + self.mlp["down"](F.gelu(self.mlp["up"](hidden)))


class Model(nn.Module):
    """`[b, s]` token ids -> `[b, s, vocab]` logits."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.embed = nn.Embedding(VOCAB, HIDDEN)
            self.layers = nn.ModuleList(Block() for _ in range(4))
            self.norm = nn.LayerNorm(HIDDEN)
            self.head = nn.Linear(HIDDEN, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))

    def parallel_plan(self) -> ParallelPlan:
        return ParallelPlan(
            units=("embed", "layers.*", "norm", "head"),
            tensor={"layers.*.mlp.up": "colwise", "layers.*.mlp.down": "rowwise"},
        )


class Rows(Dataset[dict[str, Tensor]]):
    """Token rows with their number, the same on every rank; row 3 and every fifth after it has ignored labels."""

    def __init__(self, size: int, seed: int = 1) -> None:
        self.ids = torch.randint(0, VOCAB, (size, LENGTH + 1), generator=torch.Generator().manual_seed(seed))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        labels = self.ids[index, 1:].clone()
        if index % 5 == 3:
            labels[: 1 + index % LENGTH] = -100
        return {"ids": self.ids[index, :-1], "labels": labels, "row": torch.tensor(index)}


def loader(layout: ContractLayout, size: int, seed: int = 1, **options: Any) -> DataLoader[Any]:
    return DataLoader(Rows(size, seed), batch_size=layout.batch_size, **options)


def row_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean loss of each row over its own tokens, `[b]`; ignored labels count as zero."""
    return F.cross_entropy(logits.transpose(1, 2), labels, reduction="none", ignore_index=-100).mean(1)


class Module(pl.LightningModule):
    """The simplest training; items add to it."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Model()

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return row_losses(self.model(batch["ids"]), batch["labels"]).mean()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.9)


def make_trainer(layout: ContractLayout, strategy: dict[str, Any] | None = None, **options: Any) -> pl.Trainer:
    """A quiet Trainer of the layout; `options` go to it, `strategy` adds to the strategy's arguments."""
    settings: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": layout.world_size,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "log_every_n_steps": 1,
        **options,
    }
    if layout.strategy is None:
        settings["strategy"] = SingleDeviceStrategy("cpu")
    else:
        settings["strategy"] = HybridParallelStrategy(**{**layout.strategy, **(strategy or {})})
    return pl.Trainer(**settings)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    os.environ["PL_GLOBAL_SEED"] = "3"
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


class LossRecorder(pl.Callback):
    """The loss of every training batch."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, batch: Any, index: int) -> None:
        self.losses.append(float(outputs["loss"]))
