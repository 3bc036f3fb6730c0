"""Runs the grid of schedules, shardings and settings that fits 8 processes through the parity gate.

    .venv/bin/python benchmarks/grid.py [--seed 0] [--limit N] [--skip N] [--only TEXT] [--json FILE]

Every pair of levels of two factors occurs in some point of the sample; another seed is another sample. A point is `same` as one
process, `refused` with the reason, or `DIFFERENT` with the first divergence and its causes. The exit code is 1 if any differs.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from grid_points import Factors, Point, sample
from grid_pool import FailedError, Pool, RefusedError
from torch.utils.data import DataLoader, Dataset

from hybrid_strategy.errors import ConfigError
from hybrid_strategy.modules.language_model import LanguageModel
from hybrid_strategy.parity.files import LAYOUT, REFERENCE
from hybrid_strategy.parity.records import RunRecord
from hybrid_strategy.parity.report import ParityReport
from hybrid_strategy.parity.request import ParityOptions, ParityRequest, make_request
from hybrid_strategy.parity.verdict import judge
from hybrid_strategy.parity.worker import record_layout, record_reference
from hybrid_strategy.planning.layouts import check_layout
from hybrid_strategy.registry import parts
from hybrid_strategy.spec.batch import BatchSpec
from hybrid_strategy.spec.model_shape import ModelShape
from hybrid_strategy.spec.training import LearningRateSpec, OptimizerSpec

MAX_PROCESSES, STEPS = 8, 3
GLOBAL_BATCH, NUM_LAYERS, SEQUENCE_LENGTH = 16, 9, 16
ROWS = {"even": 64, "uneven": 39}
MICRO_BATCHES = {"even": 4, "uneven": 3}
TIMEOUT_SECONDS = 240.0


def factors() -> Factors:
    """The grid: every registered schedule, sharding and family is in it."""
    schedules = sorted(parts("schedules"))
    pipelines = ["none", *(f"{size} {name}" for size in (2, 4) for name in schedules)]
    shardings = sorted(parts("parallel.sharding"))
    data = ["none", *(f"2 {name}" for name in shardings), *(f"4 {name} in 2 groups" for name in shardings if name != "ddp")]
    levels = {
        "pipeline": tuple(pipelines),
        "data": tuple(data),
        "tensor": ("none", "2", "2 sequence"),
        "context": ("none", "2"),
        "accumulate": ("1", "3"),
        "checkpoint": ("none", "selective", "full"),
        "family": tuple(sorted(parts("models"))),
        "embeddings": ("untied", "tied"),
        "batch": ("even", "uneven"),
        "clip": ("none", "norm"),
    }
    axes = ("pipeline", "data", "tensor", "context")
    processes = {(name, level): int(level[0]) for name in axes for level in levels[name] if level[0].isdigit()}
    return Factors(levels, processes, MAX_PROCESSES)


class Tokens(Dataset[dict[str, torch.Tensor]]):
    """Random rows of tokens, the same in every process."""

    def __init__(self, rows: int, vocab_size: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.rows = torch.randint(0, vocab_size, (rows, SEQUENCE_LENGTH + 1), generator=generator)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index, :-1], "labels": self.rows[index, 1:]}


def shape_of(point: Point) -> ModelShape:
    """A tiny model of the family, with more layers than the largest number of stages and not a multiple of it."""
    tiny = parts("models")[point["family"]].tiny
    tied = point["embeddings"] == "tied"
    return replace(tiny, num_layers=NUM_LAYERS, sequence_length=SEQUENCE_LENGTH, tied_embeddings=tied)


def strategy_of(point: Point) -> dict[str, Any]:
    """Arguments of the strategy."""
    pipeline, data, tensor = (point[name].split() for name in ("pipeline", "data", "tensor"))
    arguments: dict[str, Any] = {
        "num_microbatches": MICRO_BATCHES[point["batch"]],
        "activation_checkpoint": point["checkpoint"],
        "seed": 0,
    }
    if pipeline[0] != "none":
        arguments |= {"pipeline_parallel_size": int(pipeline[0]), "schedule": pipeline[1]}
    if tensor[0] != "none":
        arguments |= {"tensor_parallel_size": int(tensor[0]), "sequence_parallel": "sequence" in tensor}
    if point["context"] != "none":
        arguments["context_parallel_size"] = int(point["context"])
    if data[0] != "none":
        arguments |= {"sharding": data[1], "data_parallel_replicate_size": 2 if "groups" in data else 1}
    return arguments


def data_size(point: Point) -> int:
    return 1 if point["data"] == "none" else int(point["data"].split()[0])


def request_of(point: Point) -> ParityRequest:
    """What the gate runs.

    Raises:
        ConfigError: it is refused by the numbers of the point alone.
    """
    shape, strategy, copies, grid = shape_of(point), strategy_of(point), data_size(point), factors()
    trainer: dict[str, Any] = {"accumulate_grad_batches": int(point["accumulate"])}
    if point["clip"] == "norm":
        trainer["gradient_clip_val"] = 0.1
    module = partial(LanguageModel, shape, OptimizerSpec(learning_rate=1e-3), LearningRateSpec(schedule="constant"))
    data = DataLoader(Tokens(ROWS[point["batch"]], shape.vocab_size), batch_size=GLOBAL_BATCH // copies, shuffle=True)
    options = ParityOptions(trainer=trainer, accelerator="cpu", timeout_seconds=TIMEOUT_SECONDS)
    request = make_request(module, data, strategy, STEPS, grid.size(point.items()), options)
    batch = BatchSpec(GLOBAL_BATCH * request.accumulate, MICRO_BATCHES[point["batch"]], request.accumulate)
    check_layout(request.layout, shape=shape, batch=batch)
    return request


def is_refused(point: Point) -> bool:
    """By its numbers alone."""
    try:
        request_of(point)
    except ConfigError:
        return True
    return False


@dataclass(frozen=True)
class Outcome:
    """`verdict`: same, refused or DIFFERENT; `text`: why."""

    point: Point
    verdict: str
    text: str
    seconds: float
    report: ParityReport | None = None


class Runner:
    """Runs points on one pool; one process's record serves all points with the same model, data and Trainer arguments."""

    def __init__(self, folder: Path) -> None:
        self.pool, self._folder = Pool(), folder
        self._references: dict[tuple[str, ...], Path] = {}

    def run(self, point: Point) -> Outcome:
        """Runs one point."""
        started = time.monotonic()
        report = None
        try:
            request = request_of(point)
            report = self._compare(point, request)
            verdict, text = ("same", "") if report.same else ("DIFFERENT", str(report))
        except (ConfigError, RefusedError) as error:
            verdict, text = "refused", str(error)
        except FailedError as error:
            verdict, text = "DIFFERENT", str(error)
        return Outcome(point, verdict, text, time.monotonic() - started, report)

    def _compare(self, point: Point, request: ParityRequest) -> ParityReport:
        reference = self._reference(point, request)
        folder = self._folder / LAYOUT
        try:
            self.pool.run(record_layout, request.world_size, request, folder, timeout=TIMEOUT_SECONDS)
            return judge(request, RunRecord(reference, 1), RunRecord(folder, request.world_size))
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _reference(self, point: Point, request: ParityRequest) -> Path:
        key = tuple(point[name] for name in ("family", "embeddings", "batch", "accumulate", "clip"))
        if key not in self._references:
            folder = self._folder / REFERENCE / "-".join(key)
            self.pool.run(record_reference, 1, request, folder, timeout=TIMEOUT_SECONDS)
            self._references[key] = folder
        return self._references[key]


def words(point: Point) -> str:
    """A point on one line: what is not the first level of its factor."""
    first = {name: levels[0] for name, levels in factors().levels.items()}
    shown = [f"{name} {level}" for name, level in point.items() if level != first[name]]
    return ", ".join(shown) or "one process"


def figures(outcomes: Sequence[Outcome], seconds: float, covered: float) -> list[dict[str, Any]]:
    """The figures for `--json`."""
    counts = Counter(outcome.verdict for outcome in outcomes)
    reports = [outcome.report for outcome in outcomes if outcome.report is not None and outcome.report.same]
    worst = {
        name: max((row.difference for each in reports for row in each.rows if row.quantity == name), default=0.0)
        for name in ("loss", "gradients")
    }
    rows = [
        ("grid.same", counts["same"], "points", None),
        ("grid.refused", counts["refused"], "points", None),
        ("grid.different", counts["DIFFERENT"], "points", 0),
        ("grid.pairs_covered", covered, "fraction", 1.0),
        ("grid.worst_loss", worst["loss"], "relative", 1e-6),
        ("grid.worst_gradient", worst["gradients"], "of the largest gradient", 1e-5),
        ("grid.seconds", seconds, "s", 3600),
    ]
    return [{"name": name, "value": value, "unit": unit, "goal": goal} for name, value, unit, goal in rows]


def run(seed: int, places: slice, only: str | None) -> tuple[list[Outcome], list[dict[str, Any]]]:
    """Runs a sample and prints a line a point."""
    grid, started = factors(), time.monotonic()
    all_pairs = grid.pairs()
    chosen = [(point, new) for point, new in sample(grid, seed, is_refused) if only is None or only in words(point)]
    outcomes, seen = [], set()
    with tempfile.TemporaryDirectory(prefix="hybrid-grid-") as name:
        runner = Runner(Path(name))
        try:
            for index, (point, new) in list(enumerate(chosen, start=1))[places]:
                outcome = runner.run(point)
                outcomes.append(outcome)
                seen |= new
                print(f"[{index:3d}/{len(chosen)}] {outcome.verdict:9} {outcome.seconds:5.1f} s  {words(point)}", flush=True)
                if outcome.text:
                    print("          " + outcome.text.replace("\n", "\n          "), flush=True)
        finally:
            runner.pool.close()
    return outcomes, figures(outcomes, time.monotonic() - started, len(seen) / len(all_pairs))


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs, prints, writes; 1 if a point differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--limit", type=int, help="run so many points of the sample only")
    parser.add_argument("--skip", type=int, default=0, help="leave out the first points of the sample")
    parser.add_argument("--only", help="run the points whose line holds this text only")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    given = parser.parse_args(arguments)
    stop = None if given.limit is None else given.skip + given.limit
    outcomes, found = run(given.seed, slice(given.skip, stop), given.only)
    counts = Counter(outcome.verdict for outcome in outcomes)
    print(f"\n{counts['same']} same, {counts['refused']} refused, {counts['DIFFERENT']} different, of {len(outcomes)} points")
    if given.json:
        given.json.write_text(json.dumps(found, indent=2))
    return 1 if counts["DIFFERENT"] else 0


if __name__ == "__main__":
    sys.exit(main())
