"""A small language model, its data, and one function that trains it in any layout and returns every number of every step."""

from __future__ import annotations

import contextlib
import io
import warnings
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

from hybrid_strategy import HybridParallelStrategy
from hybrid_strategy.models.llama import PART as LLAMA
from hybrid_strategy.spec.model_shape import ModelShape
from tests.support.ranks import run_ranks

SHAPE = ModelShape(
    hidden_size=32,
    num_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=48,
    vocab_size=64,
    sequence_length=16,
)


ADAM_RATE = 1e-3


class Tokens(Dataset[dict[str, torch.Tensor]]):
    """Random token rows, the same on every rank."""

    def __init__(self, rows: int, length: int = 16, vocab: int = 64) -> None:
        self.rows = torch.randint(0, vocab, (rows, length + 1), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index, :-1], "labels": self.rows[index, 1:]}


class TinyLM(pl.LightningModule):
    """An ordinary module: knows nothing of parallelism."""

    def __init__(self, shape: ModelShape = SHAPE, optimizer: str = "adamw", meta: bool = True) -> None:
        super().__init__()
        self.shape, self.optimizer, self.meta = shape, optimizer, meta
        self.model: nn.Module | None = None

    def configure_model(self) -> None:
        if self.model is None:
            with torch.device("meta" if self.meta else "cpu"):
                self.model = LLAMA.build(self.shape)

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        logits = self.model(batch["input_ids"])
        loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        logits = self.model(batch["input_ids"])
        self.log("val_loss", F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.optimizer == "sgd":
            return torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.9)
        return torch.optim.AdamW(self.parameters(), lr=ADAM_RATE)


@dataclass
class Case:
    """One training run: strategy arguments, Trainer arguments, sizes."""

    strategy: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    shape: ModelShape = SHAPE
    rows: int = 64
    batch_size: int = 8
    steps: int = 3
    module: Any = TinyLM
    module_arguments: dict[str, Any] = field(default_factory=dict)
    checkpoint: str | None = None


class Recorder(pl.Callback):
    """Keeps, for every optimizer step, this rank's pieces of all gradients and weights, the loss and what was logged."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []
        self.initial: dict[str, Any] = {}

    def _pieces(self, trainer: pl.Trainer, gradients: bool) -> dict[str, Any]:
        made = trainer.strategy.made
        found = {}
        for slot in made.slots:
            parameter = made.sharding.optimizer_parameter(slot)
            value = parameter.grad if gradients else parameter
            found[slot.name] = (slot.shard_spec, None if value is None else value.detach().clone())
        return found

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.initial = self._pieces(trainer, gradients=False)

    def on_before_optimizer_step(self, trainer: pl.Trainer, module: pl.LightningModule, optimizer: Any) -> None:
        self.steps.append({"gradients": self._pieces(trainer, gradients=True)})

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, batch: Any, index: int) -> None:
        if not self.steps or "weights" in self.steps[-1]:
            return
        logged = {name: value.item() for name, value in trainer.callback_metrics.items()}
        self.steps[-1].update(loss=outputs["loss"].item(), logged=logged, weights=self._pieces(trainer, gradients=False))


def train_here(case: Case) -> dict[str, Any]:
    """Trains in the processes that are joined already; returns this rank's record."""
    import os

    recorder = Recorder()
    os.environ["PL_GLOBAL_SEED"] = "3"
    module = case.module(case.shape, **case.module_arguments)
    data = Tokens(case.rows, case.shape.sequence_length, case.shape.vocab_size)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    options = {
        "max_steps": case.steps,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "limit_val_batches": 2,
        "val_check_interval": None,
        **case.trainer,
    }
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=world,
            strategy=HybridParallelStrategy(**case.strategy),
            callbacks=[recorder, *options.pop("callbacks", [])],
            **options,
        )
        loader = DataLoader(data, batch_size=case.batch_size, shuffle=True)
        trainer.fit(module, loader, DataLoader(data, batch_size=case.batch_size), ckpt_path=case.checkpoint)
    final = {name: value.item() for name, value in trainer.callback_metrics.items()}
    return {"initial": recorder.initial, "steps": recorder.steps, "final": final}


_of_one_process: dict[str, list[dict[str, Any]]] = {}


def train(case: Case, world_size: int, timeout: float = 120) -> list[dict[str, Any]]:
    """Trains on so many processes; the records of all ranks, which are not to be changed: one process does a case once."""
    key = repr(case)
    if world_size > 1 or " at 0x" in key or case.checkpoint is not None:  # an object's address says nothing of what it is
        return run_ranks(train_here, world_size, case, timeout=timeout, process_group=False)
    if key not in _of_one_process:
        _of_one_process[key] = run_ranks(train_here, 1, case, timeout=timeout, process_group=False)
    return _of_one_process[key]


def assemble(records: list[dict[str, Any]], pick: Any) -> dict[str, torch.Tensor]:
    """Whole tensors by name from the pieces of all ranks; replicas that disagree fail."""
    whole: dict[str, torch.Tensor] = {}
    for record in records:
        for name, (spec, piece) in pick(record).items():
            if piece is None:
                continue
            target = whole.setdefault(name, torch.full(spec.full_shape, float("nan"), dtype=piece.dtype))
            known = target[spec.slices]
            fresh = torch.isnan(known)
            if not torch.allclose(known[~fresh], piece[~fresh], rtol=1e-6, atol=1e-8):
                raise AssertionError(f"replicas of {name} differ")
            target[spec.slices] = piece
    return whole


def compare(reference: list[dict[str, Any]], records: list[dict[str, Any]], loss: float = 1e-6, gradient: float = 1e-5) -> None:
    """Initial weights bit-equal; loss, gradients and weights of every step equal within the tolerance."""
    first, other = (assemble(each, lambda record: record["initial"]) for each in (reference, records))
    assert first.keys() == other.keys()
    for name, value in first.items():
        assert torch.equal(value, other[name]), f"initial {name}"
    assert len(reference[0]["steps"]) == len(records[0]["steps"])
    for step, wanted in enumerate(reference[0]["steps"]):
        for record in records:
            got = record["steps"][step]
            assert abs(got["loss"] - wanted["loss"]) <= loss * abs(wanted["loss"]), (
                f"step {step}: {got['loss']} for {wanted['loss']}"
            )
            assert got["logged"].keys() == wanted["logged"].keys()
            for key, value in wanted["logged"].items():
                assert abs(got["logged"][key] - value) <= loss * abs(value) + 1e-9, (
                    f"step {step}: {key} {got['logged'][key]} for {value}"
                )
        for what in ("gradients", "weights"):
            want = assemble(reference, lambda record, s=step, w=what: record["steps"][s][w])
            have = assemble(records, lambda record, s=step, w=what: record["steps"][s][w])
            assert want.keys() == have.keys(), f"step {step}: {what} of {want.keys() ^ have.keys()}"
            scale = max(value.abs().max().item() for value in want.values())
            # Adam divides by the gradient's size, so that rounding in a tiny gradient can move a weight by a share of the rate
            bound = gradient * scale if what == "gradients" else 1e-5 * scale + 0.05 * ADAM_RATE
            for name, value in want.items():
                error = (have[name] - value).abs().max().item()
                assert error <= bound, f"step {step}: {what} {name} differ by {error}, more than {bound}"
