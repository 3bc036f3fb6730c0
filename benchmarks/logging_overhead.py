"""What `self.log` costs in a pipeline: twenty calls a step, in every micro-batch, against the same steps without them.

    .venv/bin/python benchmarks/logging_overhead.py [--names 20] [--microbatches 8] [--blocks 12] [--json FILE]

Two pipeline ranks train a model that costs next to nothing, so that what logging adds is seen in absolute terms; it is set
against a step of 0.3 s. Blocks of steps with and without logging alternate, so that a slower machine hurts both; medians
are compared.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import lightning.pytorch as pl
import torch
from torch import Tensor

from tests.contract.layouts import ContractLayout
from tests.contract.models import Module, loader, make_trainer, quiet
from tests.support.ranks import run_ranks

STEP_SECONDS = 0.3
"""The step that the cost is set against."""
BLOCK, SETTLE = 20, 4
"""Steps of a block, and how many of its first ones are left out: names are agreed on there."""


class Logging(Module):
    """Logs `names` values a step in every second block."""

    def __init__(self, names: int) -> None:
        super().__init__()
        self.names = [f"value_{index}" for index in range(names)]

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        if batch_idx // BLOCK % 2:
            value = loss.detach()
            for name in self.names:
                self.log(name, value)
        return loss


class StepTimes(pl.Callback):
    """Seconds of every step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._last = 0.0

    def on_train_start(self, *_: Any) -> None:
        self._last = perf_counter()

    def on_train_batch_end(self, *_: Any) -> None:
        now = perf_counter()
        self.seconds.append(now - self._last)
        self._last = now


def steps_here(layout: ContractLayout, names: int, blocks: int) -> list[float]:
    """Trains in this process; the seconds of every step."""
    torch.set_num_threads(1)
    times = StepTimes()
    with quiet():
        trainer = make_trainer(layout, max_steps=blocks * BLOCK, callbacks=[times], log_every_n_steps=50)
        trainer.fit(Logging(names), loader(layout, 8 * blocks * BLOCK))
    return times.seconds


def overhead(seconds: list[float]) -> tuple[float, float]:
    """Median seconds of a step without logging, and with it."""
    kinds: tuple[list[float], list[float]] = ([], [])
    for index, each in enumerate(seconds):
        if index % BLOCK >= SETTLE and index >= BLOCK:
            kinds[index // BLOCK % 2].append(each)
    return median(kinds[0]), median(kinds[1])


def measure(pipeline: int, names: int, microbatches: int, blocks: int) -> dict[str, float]:
    """Of the slowest rank."""
    strategy = {"num_microbatches": microbatches}
    strategy |= {"pipeline_parallel_size": pipeline} if pipeline > 1 else {}
    layout = ContractLayout(f"pp{pipeline}", pipeline, 1, strategy)
    ranks = run_ranks(steps_here, pipeline, layout, names, blocks, process_group=False, timeout=500)
    pairs = [overhead(each) for each in ranks]
    plain, logged = max(each[0] for each in pairs), max(each[1] for each in pairs)
    return {"plain_seconds": plain, "logged_seconds": logged, "share": (logged - plain) / STEP_SECONDS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--names", type=int, default=20)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--pipeline", type=int, default=2)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    found = measure(given.pipeline, given.names, given.microbatches, given.blocks)
    added = 1e3 * (found["logged_seconds"] - found["plain_seconds"])
    print(f"pp{given.pipeline}, {given.names} values, {given.microbatches} micro-batches a step")
    print(f"  step without logging   {1e3 * found['plain_seconds']:8.2f} ms")
    print(f"  step with logging      {1e3 * found['logged_seconds']:8.2f} ms")
    print(f"  added                  {added:8.2f} ms = {found['share']:.2%} of a step of {STEP_SECONDS:g} s (goal: under 2 %)")
    if given.json:
        row = {"name": "logging_overhead", "value": found["share"], "unit": "fraction of a 0.3 s step", "goal": 0.02}
        given.json.write_text(json.dumps([row], indent=2))


if __name__ == "__main__":
    main()
