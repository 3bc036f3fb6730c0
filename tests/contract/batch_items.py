"""Point 5: batches of any kind and from any source, cut as one process would see them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from tests.contract.items import Item
from tests.contract.layouts import ContractLayout
from tests.contract.models import LENGTH, VOCAB, LossRecorder, Module, Rows, loader, make_trainer, row_losses


@dataclass
class Example:
    ids: Tensor
    labels: Tensor
    source: str = "book"


class Pair(NamedTuple):
    ids: Tensor
    labels: Tensor


class Opaque:
    """A class of the user's own, of which nothing can be seen: it cannot be cut, so it is one micro-batch."""

    def __init__(self, ids: Tensor, labels: Tensor) -> None:
        self.ids, self.labels = ids, labels

    def to(self, device: Any, **_: Any) -> Opaque:
        return self


def _encoding(ids: Tensor, labels: Tensor) -> Any:
    from transformers import BatchEncoding

    return BatchEncoding({"input_ids": ids, "labels": labels})


def _with_extras(ids: Tensor, labels: Tensor) -> dict[str, Any]:
    names = [f"row {int(row.sum())}" for row in ids]
    return {"ids": ids, "labels": labels, "names": names, "task": "copy", "scale": 0.5, "nothing": None, "count": len(ids)}


@dataclass(frozen=True)
class Kind:
    """A way to hand on ids and labels, and to read them again."""

    pack: Callable[[Tensor, Tensor], Any]
    read: Callable[[Any], tuple[Tensor, Tensor]]


KINDS = {
    "dict": Kind(lambda i, t: {"ids": i, "labels": t}, lambda b: (b["ids"], b["labels"])),
    "tuple": Kind(lambda i, t: (i, t), lambda b: (b[0], b[1])),
    "list": Kind(lambda i, t: [i, t], lambda b: (b[0], b[1])),
    "dataclass": Kind(lambda i, t: Example(i, t), lambda b: (b.ids, b.labels)),
    "named": Kind(lambda i, t: Pair(i, t), lambda b: (b.ids, b.labels)),
    "nested": Kind(
        lambda i, t: {"x": {"deep": [i, {"more": (t,)}]}}, lambda b: (b["x"]["deep"][0], b["x"]["deep"][1]["more"][0])
    ),
    "encoding": Kind(_encoding, lambda b: (b["input_ids"], b["labels"])),
    "extras": Kind(_with_extras, lambda b: _checked_extras(b)),
    "transposed": Kind(lambda i, t: {"ids": i.T, "labels": t.T}, lambda b: (b["ids"].T, b["labels"].T)),
    "texts": Kind(lambda i, t: [" ".join(map(str, each.tolist())) for each in torch.cat([i, t], 1)], lambda b: _numbers(b)),
    "opaque": Kind(Opaque, lambda b: (b.ids, b.labels)),
}


def _numbers(texts: list[str]) -> tuple[Tensor, Tensor]:
    """A step that tokenises its texts itself."""
    found = torch.tensor([[int(word) for word in text.split()] for text in texts])
    return found[:, :LENGTH], found[:, LENGTH:]


def _checked_extras(batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
    assert batch["names"] == [f"row {int(row.sum())}" for row in batch["ids"]], "names belong to other rows"
    assert (batch["task"], batch["scale"], batch["nothing"]) == ("copy", 0.5, None)
    return batch["ids"], batch["labels"]


class Reading(Module):
    def __init__(self, kind: Kind) -> None:
        super().__init__()
        self.kind = kind

    def loss(self, batch: Any) -> Tensor:
        ids, labels = self.kind.read(batch)
        return row_losses(self.model(ids), labels).mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(batch), batch_size=len(self.kind.read(batch)[0]))


def _packed(layout: ContractLayout, kind: Kind, size: int) -> DataLoader[Any]:
    def collate(rows: list[dict[str, Tensor]]) -> Any:
        return kind.pack(torch.stack([row["ids"] for row in rows]), torch.stack([row["labels"] for row in rows]))

    return loader(layout, size, collate_fn=collate)


def kinds(layout: ContractLayout, folder: str) -> Any:
    found = {}
    for name, kind in KINDS.items():
        losses = LossRecorder()
        trainer = make_trainer(layout, max_epochs=1, callbacks=[losses])
        trainer.fit(Reading(kind), _packed(layout, kind, 21), _packed(layout, kind, 9))
        found[name] = (losses.losses, float(trainer.callback_metrics["val"]))
    return found


class Masked(Module):
    """The batch has as many samples as a sequence has tokens (8): no size tells the mask from the samples."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            self.places = nn.Embedding(32, VOCAB)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        logits = self.model(batch["ids"])
        mask, positions = batch["mask"], batch["positions"]
        logits = (mask / mask.sum(-1, keepdim=True)) @ logits + self.places(positions)
        return row_losses(logits, batch["labels"]).mean()


def _with_mask(rows: list[dict[str, Tensor]], length: int = 8) -> dict[str, Tensor]:
    ids = torch.stack([row["ids"][:length] for row in rows])
    return {
        "positions": torch.arange(length),
        "mask": torch.ones(length, length).tril(),
        "ids": ids,
        "labels": ids.roll(-1, 1),
    }


def shared(layout: ContractLayout, folder: str) -> Any:
    """Masks and positions that all samples share, in front of the samples; found out, and declared."""
    found = {}
    for name, dims in (("found", {}), ("declared", {"mask": None, "positions": None})):
        module, losses = Masked(), LossRecorder()
        module.batch_dims = dims
        make_trainer(layout, max_epochs=2, callbacks=[losses]).fit(module, loader(layout, 16, collate_fn=_with_mask))
        found[name] = losses.losses
    return found


def _ragged(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Padded to the longest row of the batch, and to a multiple of 4, which context parallelism can cut."""
    lengths = [2 + int(row["row"]) // 3 % 9 for row in rows]
    ids = torch.zeros(len(rows), -(-max(lengths) // 4) * 4, dtype=torch.long)
    labels = torch.full_like(ids, -100)
    for index, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        ids[index, :length], labels[index, :length] = row["ids"][:length], row["labels"][:length]
    return {"ids": ids, "labels": labels}


class Ragged(Module):
    """The loss does not depend on how far a batch is padded."""

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        losses = row_losses(self.model(batch["ids"]), batch["labels"])
        return losses.mean() * batch["labels"].shape[1] / LENGTH


def lengths(layout: ContractLayout, folder: str) -> Any:
    losses = LossRecorder()
    make_trainer(layout, max_epochs=2, callbacks=[losses]).fit(Ragged(), loader(layout, 29, collate_fn=_ragged))
    return {"losses": losses.losses}


class Stream(IterableDataset[Any]):
    """Rows in order, shared out by whoever reads them."""

    def __init__(self, size: int) -> None:
        self.rows = Rows(size)

    def __iter__(self) -> Iterator[Any]:
        return (self.rows[index] for index in range(len(self.rows)))


class Brought(IterableDataset[Any]):
    """Batches that each data-parallel rank brings itself; the second rank has one less."""

    data_parallel_sharded = True

    def __init__(self, layout: ContractLayout, rank: int) -> None:
        self.rows, self.layout, self.rank = Rows(24), layout, rank

    def __iter__(self) -> Iterator[Any]:
        size = self.layout.batch_size
        for start in range(self.rank * size, 24 if self.rank == 0 else 16, 8):
            yield {key: torch.stack([self.rows[index][key] for index in range(start, start + size)]) for key in self.rows[0]}


class Counting(Module):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val", self.loss(batch))


def _run(layout: ContractLayout, data: Any, **options: Any) -> Any:
    losses = LossRecorder()
    trainer = make_trainer(layout, callbacks=[losses], **{"max_epochs": 2, **options})
    trainer.fit(Counting(), data, loader(layout, 17, seed=2))
    numbers = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return losses.losses, trainer.global_step, trainer.current_epoch, numbers


def sources(layout: ContractLayout, folder: str) -> Any:
    """Streams, worker processes, every limit of the Trainer."""
    stream = DataLoader(Stream(21), batch_size=layout.batch_size)
    workers = loader(layout, 21, num_workers=2, persistent_workers=True)
    return {
        "stream": _run(layout, stream, limit_val_batches=0),
        "stream_limited": _run(layout, DataLoader(Stream(28), batch_size=layout.batch_size), limit_train_batches=3),
        "workers": _run(layout, workers, max_epochs=1),
        "limits": _run(layout, loader(layout, 28), limit_train_batches=0.5, limit_val_batches=1),
        "few": _run(layout, loader(layout, 28), limit_train_batches=2, limit_val_batches=0.5),
        "overfit": _run(layout, loader(layout, 28), overfit_batches=2),
        "time": _run(layout, loader(layout, 28), max_time="00:00:00:00"),
        "fast": _run(layout, loader(layout, 28), fast_dev_run=2),
        "often": _run(layout, loader(layout, 28), val_check_interval=0.4),
        "within": _run(layout, loader(layout, 32), val_check_interval=1, accumulate_grad_batches=3, log_every_n_steps=1),
        "seldom": _run(layout, loader(layout, 28), val_check_interval=3, check_val_every_n_epoch=None),
        "epochs": _run(layout, loader(layout, 24), check_val_every_n_epoch=2, min_steps=5, max_epochs=1),
    }


def ends(layout: ContractLayout, folder: str) -> Any:
    """One rank runs out of data first: all stop there."""
    found = {}
    rank = int(os.environ.get("RANK", "0")) if layout.data_parallel_size > 1 else 0
    rank = rank % 2 if layout.pipelined else rank
    for name in ("dataset", "iterable"):
        data: Any = Brought(layout, rank)
        data = DataLoader(data, batch_size=None) if name == "dataset" else data
        losses = LossRecorder()
        trainer = make_trainer(
            layout, max_epochs=2, callbacks=[losses], limit_train_batches=2 if layout.data_parallel_size == 1 else 1.0
        )
        trainer.fit(Module(), data)
        found[name] = (losses.losses, trainer.global_step)
    return found


ITEMS = [
    Item("kinds_of_batches", 5, kinds),
    Item("shared_masks_and_positions", 5, shared),
    Item("lengths_from_step_to_step", 5, lengths),
    Item("sources_and_limits", 5, sources),
    Item("data_ends_at_different_times", 5, ends),
]
