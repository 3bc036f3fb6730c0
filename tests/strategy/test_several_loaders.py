"""Several training loaders of different length, and epochs of which a layout has nothing left: where a run goes on in them."""

from __future__ import annotations

import contextlib
import io
import os
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader

from hybrid_strategy import HybridParallelStrategy
from tests.support.ranks import run_ranks

LONG, SHORT = 37, 21
Seen = tuple[int, int, list[int], list[int] | None]


class Reader(pl.LightningModule):
    """Writes down what it reads and saves after every batch."""

    def __init__(self, folder: str, short_first: bool = False) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.folder, self.short_first = folder, short_first
        self.read: list[Seen] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        long, short = batch[::-1] if self.short_first else batch
        self.read.append((self.current_epoch, batch_idx, long.tolist(), None if short is None else short.tolist()))
        return self.weight * long.float().mean()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.trainer.save_checkpoint(os.path.join(self.folder, f"{self.current_epoch}.{batch_idx}"))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class ReaderOfOne(Reader):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step((batch, batch), batch_idx)


def _fit(module: Reader, data: Any, path: str | None = None) -> list[Seen]:
    os.environ["PL_GLOBAL_SEED"] = "3"
    options: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    world = int(os.environ.get("WORLD_SIZE", "1"))
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.filterwarnings("ignore", message="(?!train_dataloader is)")
        strategy = HybridParallelStrategy(num_microbatches=1)
        trainer = pl.Trainer(
            accelerator="cpu", devices=world, strategy=strategy, max_epochs=2, enable_checkpointing=False, **options
        )
        trainer.fit(module, data, ckpt_path=path)
    return module.read


def _loaders(mode: str, batch_size: int, short_first: bool = False) -> CombinedLoader:
    both = [DataLoader(range(size), batch_size=batch_size, shuffle=True) for size in (LONG, SHORT)]  # type: ignore[arg-type]
    return CombinedLoader(both[::-1] if short_first else both, mode)


def _resumed_everywhere(folder: str) -> list[str]:
    """Blocks of 8: five batches of the long loader, three of the short one."""
    wrong = []
    for mode, short_first in (("max_size_cycle", False), ("max_size", True), ("min_size", False)):
        place = os.path.join(folder, mode)
        whole = _fit(Reader(place, short_first), _loaders(mode, 8, short_first))
        for number in (2, 3, 8) if len(whole) > 8 else (1, 4):
            epoch, batch, *_ = whole[number]
            again = _fit(Reader(f"{place}-again", short_first), _loaders(mode, 8, short_first), f"{place}/{epoch}.{batch}")
            wrong += [f"{mode} {epoch}.{batch}"] if again != whole[number + 1 :] else []
    return wrong


def _in_other_batches(folder: str) -> tuple[list[Seen], list[Seen], list[Seen]]:
    """Saved in the second pass of the short loader; in batches of 3 its count is another one than the trainer's."""
    whole = _fit(Reader(folder), _loaders("max_size_cycle", 8))
    other = f"{folder}-3"
    threes = _fit(Reader(other), _loaders("max_size_cycle", 3), f"{folder}/0.3")
    epoch, batch, *_ = threes[0]
    return whole[4:], threes, _fit(Reader(other), _loaders("max_size_cycle", 3), f"{other}/{epoch}.{batch}")


def _with_too_few_left(folder: str) -> list[Seen]:
    """Of 22 samples 16 are read when the batches change from 4 to 8: the six that are left fill none."""
    _fit(ReaderOfOne(folder), DataLoader(range(22), batch_size=4, shuffle=True, drop_last=True))  # type: ignore[arg-type]
    larger: Any = DataLoader(range(22), batch_size=8, shuffle=True, drop_last=True)  # type: ignore[arg-type]
    return _fit(ReaderOfOne(f"{folder}-8"), larger, f"{folder}/0.3")


def _alone(folder: str) -> tuple[list[str], Any, list[Seen]]:
    others = _in_other_batches(os.path.join(folder, "other"))
    return _resumed_everywhere(folder), others, _with_too_few_left(os.path.join(folder, "few"))


def _flat(read: list[Seen], epoch: int, which: int) -> list[int]:
    return [row for step in read if step[0] == epoch for row in step[2 + which] or ()]  # type: ignore[union-attr]


def test_each_loader_goes_on_where_it_stood(tmp_path: Path) -> None:
    wrong, (rest, threes, second), few = run_ranks(_alone, 1, str(tmp_path), process_group=False, timeout=120)[0]
    assert not wrong
    for epoch in (0, 1):
        assert _flat(threes, epoch, 0) == _flat(rest, epoch, 0)
        short = [_flat(each, epoch, 1) for each in (rest, threes)]
        assert short[0][: len(short[1])] == short[1][: len(short[0])]
    assert second == threes[1:]
    assert [step[:2] for step in few] == [(1, 0), (1, 1)]


def _uneven(folder: str) -> str:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _fit(Reader(folder), _loaders("max_size_cycle", 4))
    return "".join(str(each.message) for each in caught)


def test_uneven_shares_of_several_loaders_are_told(tmp_path: Path) -> None:
    said = run_ranks(_uneven, 2, str(tmp_path), process_group=False, timeout=60)[0]
    assert "train_dataloader is '2 loaders': the last batch of one of them is not shared out evenly" in said
