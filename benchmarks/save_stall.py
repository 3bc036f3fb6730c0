"""What a checkpoint costs training: steps beside a save in the background, and the stall of a save at once.

    python benchmarks/save_stall.py [--mib N] [--saves N] [--folder FOLDER] [--json FILE]

One process with one computing thread, on a machine with a core to spare. Paired: the steps that begin while a save is being
written are compared with the steps of the same run right before it (median of the ratios). Writing speed is that of the save at
once, against what `dd` reaches on the same disk with the same number of bytes, forced to the disk as a checkpoint is, beside as
many earlier files. Saves and `dd` alternate, each after as many steps: a file is written into memory, and memory not used for
long may be slow the first time, on a virtual machine above all.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

from hybrid_strategy import HybridParallelStrategy

WIDTH, GAP = 1024, 12
"""Width of a layer (12 MiB of state each); steps between two saves at least."""


class Layers(pl.LightningModule):
    """Linear layers; weights and two moments each are the state."""

    def __init__(self, mib: int) -> None:
        super().__init__()
        count = max(1, round(mib * 2**20 / (3 * 4 * WIDTH * (WIDTH + 1))))
        self.model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(count)))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.model(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4, foreach=True)


class Stopwatch(pl.Callback):
    """Times every step and every call of save; remembers which steps had a save beside them.

    Args:
        paired: let `dd` write as much after every save.
    """

    def __init__(self, folder: Path, saves: int, paired: bool) -> None:
        self.folder, self.saves, self.paired = folder, saves, paired
        self.steps: list[tuple[float, int]] = []
        self.calls: list[float] = []
        self.plain: list[float] = []
        self._began = 0.0
        self._quiet = -GAP // 2  # the first steps warm up

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        self._busy = _is_writing()
        self._began = time.perf_counter()

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *arguments: Any) -> None:
        self.steps.append((time.perf_counter() - self._began, len(self.calls) if self._busy else 0))
        self._quiet = 0 if self._busy else self._quiet + 1
        if self._quiet >= GAP:
            if len(self.calls) == self.saves and len(self.plain) == (self.saves if self.paired else 0):
                trainer.should_stop = True
                return
            self._quiet = 0
            if self.paired and len(self.plain) < len(self.calls):
                self.plain.append(dd_seconds(self.folder, len(self.calls)))
                return
            self.steps.append((0.0, -1))  # marks where the save begins
            started = time.perf_counter()
            trainer.save_checkpoint(self.folder / f"{len(self.calls)}.ckpt")
            self.calls.append(time.perf_counter() - started)
            trainer.strategy.remove_checkpoint(self.folder / f"{len(self.calls) - 2}.ckpt")


def _is_writing() -> bool:
    return any(thread.name == "checkpoint-writer" for thread in threading.enumerate())


def ratios(steps: Sequence[tuple[float, int]]) -> list[float]:
    """For each save, the median of the steps beside it over the median of the steps right before it."""
    found, before, beside = [], [], []
    for seconds, kind in [*steps, (0.0, -1)]:
        if kind == -1:
            if beside:
                found.append(median(beside) / median(before[-GAP // 2 :]))
                before, beside = [], []
        elif kind:
            beside.append(seconds)
        elif not beside:
            before.append(seconds)
        else:
            found.append(median(beside) / median(before[-GAP // 2 :]))
            before, beside = [seconds], []
    return found


def measure(folder: Path, mib: int, saves: int, background: bool) -> Stopwatch:
    """One run."""
    folder.mkdir()
    watch, options = (
        Stopwatch(folder, saves, paired=not background),
        {"logger": False, "enable_checkpointing": False, "enable_model_summary": False},
    )
    strategy = HybridParallelStrategy(asynchronous_checkpoint=background)
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, strategy=strategy, callbacks=[watch], max_epochs=-1, enable_progress_bar=False, **options
    )
    trainer.fit(Layers(mib), DataLoader(torch.randn(4096, WIDTH), batch_size=256))
    return watch


def size_of(checkpoint: Path) -> int:
    """Bytes of its files."""
    return sum(each.stat().st_size for each in checkpoint.iterdir())


def dd_seconds(folder: Path, number: int) -> float:
    """Time for `dd` to write as much as the newest checkpoint and force it to the disk; the file before stays."""
    count = max(1, size_of(folder / f"{number - 1}.ckpt") // 2**20)
    command = ["dd", "if=/dev/zero", f"of={folder / f'dd{number}'}", "bs=1M", f"count={count}", "conv=fsync", "status=none"]
    started = time.perf_counter()
    subprocess.run(command, check=True)
    seconds = time.perf_counter() - started
    (folder / f"dd{number - 1}").unlink(missing_ok=True)
    return seconds


def run(folder: Path, mib: int, saves: int) -> dict[str, float]:
    """The figures by name."""
    torch.set_num_threads(1)
    background = measure(folder / "background", mib, saves, True)
    at_once = measure(folder / "at_once", mib, saves, False)
    size = size_of(folder / "at_once" / f"{saves - 1}.ckpt")
    normal = median(seconds for seconds, kind in at_once.steps if kind == 0)
    return {
        "state": size / 2**20,
        "step": 1e3 * normal,
        "step beside a save": median(ratios(background.steps)),
        "stall in the background": 1e3 * median(background.calls),
        "stall at once": 1e3 * median(at_once.calls),
        "writing": size / 2**20 / median(at_once.calls),
        "dd": size / 2**20 / median(at_once.plain),
        "writing of dd": median(plain / call for plain, call in zip(at_once.plain, at_once.calls, strict=True)),
    }


UNITS = {
    "state": ("MiB", ""),
    "step": ("ms", ""),
    "step beside a save": ("x", "<= 1.15"),
    "stall in the background": ("ms", ""),
    "stall at once": ("ms", ""),
    "writing": ("MiB/s", ""),
    "dd": ("MiB/s", ""),
    "writing of dd": ("x", ">= 0.7"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--mib", type=int, default=200, help="size of the state (200)")
    parser.add_argument("--saves", type=int, default=7, help="saves of each kind (7)")
    parser.add_argument("--folder", help="on the disk to measure (default: that of temporary files)")
    parser.add_argument("--json", metavar="FILE", help="write the figures here")
    given = parser.parse_args(argv)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        found = run(Path(folder), given.mib, given.saves)
    for name, value in found.items():
        unit, goal = UNITS[name]
        print(f"{name:<24} {value:10.2f} {unit:<6} {goal}")
    if given.json:
        figures = [
            {"name": name, "value": value, "unit": UNITS[name][0], "goal": UNITS[name][1]} for name, value in found.items()
        ]
        Path(given.json).write_text(json.dumps(figures, indent=2), encoding="utf-8")
    return 0 if found["step beside a save"] <= 1.15 and found["writing of dd"] >= 0.7 else 1


if __name__ == "__main__":
    sys.exit(main())
