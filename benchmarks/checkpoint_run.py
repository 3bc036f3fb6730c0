"""What the checkpoint benchmarks train: a small model with a tied and a frozen parameter, two groups, odd shapes.

Samples have numbers. Every rank writes down each step it has finished: which samples, which loss, which rates.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import checkpoint_kill
import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset

from hybrid_strategy.models.gpt import PART as GPT

SHAPE = replace(GPT.tiny, num_layers=4, tied_embeddings=True)
GLOBAL_BATCH = 12
ROWS = 72
"""Six steps an epoch, so that a run crosses into a second, reshuffled one."""

_PIPELINE = {"pipeline_parallel_size": 2, "num_microbatches": 2}
LAYOUTS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "single": (1, 1, {}),
    "dp2": (2, 2, {}),
    "dp3": (3, 3, {}),
    "dp2_zero1": (2, 2, {"sharding": "zero1"}),
    "dp2_zero2": (2, 2, {"sharding": "zero2"}),
    "dp2_zero3": (2, 2, {"sharding": "zero3"}),
    "tp2": (2, 1, {"tensor_parallel_size": 2}),
    "tp2_sp": (2, 1, {"tensor_parallel_size": 2, "sequence_parallel": True}),
    "pp2": (2, 1, _PIPELINE),
    "pp2_interleaved": (2, 1, {**_PIPELINE, "schedule": "Interleaved1F1B"}),
    "pp3": (3, 1, {"pipeline_parallel_size": 3, "num_microbatches": 3}),
    "dp2_tp2": (4, 2, {"tensor_parallel_size": 2}),
    "dp2_pp2": (4, 2, _PIPELINE),
}
"""Name -> (processes, data-parallel size, arguments of the strategy)."""


class Numbered(Dataset[dict[str, torch.Tensor]]):
    """Rows of tokens that carry their number."""

    def __init__(self) -> None:
        size = (ROWS, SHAPE.sequence_length + 1)
        self.rows = torch.randint(0, SHAPE.vocab_size, size, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"index": torch.tensor(index), "input_ids": self.rows[index, :-1], "labels": self.rows[index, 1:]}


class NumberedData(pl.LightningDataModule):
    """The rows, shuffled; `batch_size` is that of one data-parallel rank."""

    def __init__(self, batch_size: int = GLOBAL_BATCH) -> None:
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Numbered(), self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Numbered(), self.batch_size)


class RecordedLM(pl.LightningModule):
    """Leaves `<record>/rank<r>.jsonl`, one line a finished step."""

    def __init__(self, record: str = "") -> None:
        super().__init__()
        self.record = record
        self.model: torch.nn.Module | None = None
        checkpoint_kill.arm()

    def configure_model(self) -> None:
        if self.model is None:
            with torch.device("meta"):
                self.model = GPT.build(SHAPE)
            self.model.embed_positions.table.weight.requires_grad_(False)

    def loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return F.cross_entropy(self.model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        learned = [each for each in self.parameters() if each.requires_grad]
        groups = [
            {"params": [each for each in learned if each.ndim > 1], "weight_decay": 0.1},
            {"params": [each for each in learned if each.ndim < 2], "weight_decay": 0.0, "lr": 2e-3},
        ]
        optimizer = torch.optim.AdamW(groups, lr=1e-3)
        schedule = LambdaLR(optimizer, lambda step: min(1.0, 0.2 * (step + 1)) * 0.99**step)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        checkpoint_kill.enter("training")

    def on_validation_batch_start(self, batch: Any, batch_idx: int) -> None:
        if not self.trainer.sanity_checking:
            checkpoint_kill.enter("validating")

    def configure_callbacks(self) -> list[pl.Callback]:
        return [_Writing()]

    def write_down(self, outputs: Any, batch: Any) -> None:
        """Called before a checkpoint of the step may be written."""
        if self.record:
            line = {
                "step": self.trainer.global_step,
                "epoch": self.trainer.current_epoch,
                "samples": batch["index"].tolist(),
                "loss": float(outputs["loss"]),
                "rates": [group["lr"] for group in self.trainer.optimizers[0].param_groups],
            }
            with Path(self.record, f"rank{self.global_rank}.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")


class _Writing(pl.Callback):
    """Lightning calls the module's own hook after all callbacks, and those that save after the others."""

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, batch: Any, index: int) -> None:
        cast(RecordedLM, module).write_down(outputs, batch)


def fit(layout: str, folder: str, steps: int, **more: Any) -> None:
    """Trains as one of the ranks that are joined already; records into `folder`.

    Args:
        more: `checkpoint`: go on from it; `save_to`: save at the end; `copy_to`: save before the first step; others: of the
            strategy.
    """
    from hybrid_strategy import HybridParallelStrategy

    os.makedirs(folder, exist_ok=True)
    _, data_parallel_size, strategy = LAYOUTS[layout]
    checkpoint, save_to, copy_to = (more.pop(key, None) for key in ("checkpoint", "save_to", "copy_to"))
    os.environ["PL_GLOBAL_SEED"] = "3"
    torch.manual_seed(5)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        strategy=HybridParallelStrategy(**strategy, **more),
        callbacks=[_Saver(save_to, copy_to)],
        max_steps=steps,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(RecordedLM(folder), NumberedData(GLOBAL_BATCH // data_parallel_size), ckpt_path=checkpoint)


class _Saver(pl.Callback):
    def __init__(self, at_end: str | None, at_start: str | None) -> None:
        self.at_end, self.at_start = at_end, at_start

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        path, self.at_start = self.at_start, None
        if path:
            trainer.save_checkpoint(path)

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if self.at_end:
            trainer.save_checkpoint(self.at_end)


def steps_in(folder: Path) -> dict[int, tuple[int, list[int], float, list[float]]]:
    """Step -> (epoch, the samples of all ranks, loss, rates), from what the ranks wrote down.

    Raises:
        ValueError: the ranks differ in a loss, or a rank did a step twice.
    """
    found: dict[int, tuple[int, list[int], float, list[float]]] = {}
    for path in sorted(folder.glob("rank*.jsonl")):
        own: set[int] = set()
        for line in map(json.loads, path.read_text().splitlines()):
            step, samples = line["step"], line["samples"]
            if step in own:
                raise ValueError(f"{path.name}: step {step} twice")
            own.add(step)
            if step in found:
                samples = sorted({*found[step][1], *samples})
                if abs(found[step][2] - line["loss"]) > 1e-6 * abs(line["loss"]):
                    raise ValueError(f"step {step}: the ranks have losses {found[step][2]} and {line['loss']}")
            found[step] = line["epoch"], sorted(samples), line["loss"], line["rates"]
    return found


def difference(wanted: dict[int, Any], found: dict[int, Any], first: int, last: int) -> str:
    """What differs from the reference in steps `first` to `last`; empty: nothing (losses within 1e-6, samples the same)."""
    for step in range(first, last + 1):
        if step not in found:
            return f"step {step} is missing"
        one, other = wanted[step], found[step]
        if one[:2] != other[:2]:
            return f"step {step}: epoch and samples {other[:2]}, the reference has {one[:2]}"
        if abs(one[2] - other[2]) > 1e-6 * abs(one[2]):
            return f"step {step}: loss {other[2]!r}, the reference has {one[2]!r}"
        if any(abs(a - b) > 1e-12 for a, b in zip(one[3], other[3], strict=False)):
            return f"step {step}: rates {other[3]}, the reference has {one[3]}"
    beyond = sorted(step for step in found if not first <= step <= last)
    return f"steps {beyond} were done beside" if beyond else ""
