"""What `compile=True` costs and saves: the seconds of the first compilation, and steps with and without it.

    .venv/bin/python benchmarks/compiled.py [--rounds 5] [--rows 8] [--strategy activation_checkpoint=full ...] [--json FILE]

One process trains one model through the Trainer. Blocks of steps in which the layers run as they are written alternate with
blocks in which they run compiled, so that a slower machine hurts both; medians are compared.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import lightning.pytorch as pl
import torch
from bare_loops import SHAPE
from our_loop import train_ours

from tests.support.ranks import run_ranks

BLOCK, SETTLE = 6, 2
"""Steps of a block, and how many of its first ones are left out."""


class Alternating(pl.Callback):
    """Runs every second block of steps as it is written; seconds of every step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._began = 0.0

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        torch.compiler.set_stance("default" if is_compiled(batch_idx) else "force_eager")
        self._began = perf_counter()

    def on_train_batch_end(self, *_: Any) -> None:
        self.seconds.append(perf_counter() - self._began)


def is_compiled(step: int) -> bool:
    """Does this step run compiled?"""
    return step // BLOCK % 2 == 1


def steps_here(strategy: dict[str, Any], rows: int, rounds: int) -> list[float]:
    """Trains in this process; the seconds of every step."""
    steps = 2 * BLOCK * rounds
    tokens = torch.randint(0, SHAPE.vocab_size, (rows * steps, SHAPE.sequence_length + 1))
    times = Alternating()
    train_ours({**strategy, "compile": True}, 1, (list(tokens), rows), times, steps)
    return times.seconds


def measure(strategy: dict[str, Any], rows: int, rounds: int) -> dict[str, float]:
    """Seconds: of the compilation, and medians of a step as written and compiled."""
    os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"  # what was compiled before does not count
    (seconds,) = run_ranks(steps_here, 1, strategy, rows, rounds, process_group=False, timeout=1200)
    kinds: tuple[list[float], list[float]] = ([], [])
    for step, each in enumerate(seconds):
        if step % BLOCK >= SETTLE:
            kinds[is_compiled(step)].append(each)
    plain, compiled = (median(each) for each in kinds)
    return {"compile_seconds": seconds[BLOCK] - compiled, "plain_seconds": plain, "compiled_seconds": compiled}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--strategy", nargs="*", default=[], metavar="KEY=VALUE")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    found = measure(dict(each.split("=", 1) for each in given.strategy), given.rows, given.rounds)
    ratio = found["compiled_seconds"] / found["plain_seconds"]
    print(f"{SHAPE.num_layers} layers of {SHAPE.hidden_size}, {given.rows} rows of {SHAPE.sequence_length} tokens, one process")
    print(f"  compilation            {found['compile_seconds']:8.1f} s, once")
    print(f"  step as written        {1e3 * found['plain_seconds']:8.1f} ms")
    print(f"  step compiled          {1e3 * found['compiled_seconds']:8.1f} ms = {ratio:.3f} of it")
    if given.json:
        rows = [
            {"name": "compilation", "value": found["compile_seconds"], "unit": "s", "goal": None},
            {"name": "compiled step", "value": ratio, "unit": "of a step as written", "goal": 1.0},
        ]
        given.json.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
