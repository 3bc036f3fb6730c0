"""Ledger and bill beside what is counted when the real code plays a step with fake tensors, for layouts of 8 to 1,024 ranks.

    python benchmarks/dry_run.py [--json FILE] [--only N]

Goal: every kind of memory within 5 %, bytes of every collective equal, under 60 s a layout.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hybrid_strategy.measure.beside import RankComparison, compare_ranks
from hybrid_strategy.planning.numerics import numerics_of
from hybrid_strategy.planning.scenario import Scenario
from hybrid_strategy.spec.batch import BatchSpec
from hybrid_strategy.spec.layout import Layout
from hybrid_strategy.spec.model_shape import ModelShape
from hybrid_strategy.spec.training import OptimizerSpec

B1 = ModelShape(2048, 16, 32, 8192, 32000, 2048, num_key_value_heads=8)
B8 = ModelShape(4096, 32, 32, 14336, 128256, 4096, num_key_value_heads=8)
B70 = ModelShape(8192, 80, 64, 28672, 128256, 4096, num_key_value_heads=8)

Case = tuple[ModelShape, Layout, int, int, str, tuple[int, ...]]
CASES: tuple[Case, ...] = (
    (B1, Layout(data_parallel_size=8, sharding="zero1"), 2, 2, "bf16-mixed", (0,)),
    (B1, Layout(data_parallel_size=4, tensor_parallel_size=2, sequence_parallel=True), 1, 4, "32-true", (1,)),
    (B1, Layout(data_parallel_size=4, pipeline_parallel_size=4, sharding="zero2"), 1, 8, "bf16-mixed", (0, 15)),
    (B8, Layout(data_parallel_size=32, sharding="zero3", activation_checkpoint="full"), 1, 2, "bf16-true", (5,)),
    (
        B8,
        Layout(
            data_parallel_size=8,
            tensor_parallel_size=4,
            pipeline_parallel_size=2,
            sequence_parallel=True,
            activation_checkpoint="selective",
        ),
        1,
        4,
        "bf16-mixed",
        (0, 63),
    ),
    (
        B8,
        Layout(data_parallel_size=32, pipeline_parallel_size=4, stages_per_rank=2, schedule="Interleaved1F1B", sharding="zero1"),
        1,
        8,
        "bf16-true",
        (40,),
    ),
    (
        B70,
        Layout(
            data_parallel_size=8,
            tensor_parallel_size=8,
            pipeline_parallel_size=8,
            sequence_parallel=True,
            activation_checkpoint="full",
            sharding="zero1",
        ),
        1,
        8,
        "bf16-mixed",
        (0, 511),
    ),
    (
        B70,
        Layout(
            data_parallel_size=16,
            tensor_parallel_size=8,
            pipeline_parallel_size=8,
            sequence_parallel=True,
            activation_checkpoint="selective",
            sharding="zero1",
        ),
        1,
        8,
        "bf16-mixed",
        (130,),
    ),
)
"""Model, layout, samples of a micro-batch, micro-batches, precision, ranks."""

MEMORY_GOAL, SECONDS_GOAL = 0.05, 60.0


def compared(case: Case) -> list[RankComparison]:
    """All ranks of one case."""
    shape, layout, size, count, precision, ranks = case
    batch = BatchSpec(size * count * layout.data_parallel_size, count)
    scenario = Scenario(shape, layout, batch, numerics=numerics_of(precision))
    return compare_ranks(scenario, precision, OptimizerSpec(), ranks)


def row(case: Case) -> dict[str, Any]:
    """The worst of one case."""
    started = time.perf_counter()
    found = compared(case)
    seconds = time.perf_counter() - started
    memory = max((line for each in found for line in each.memory), key=lambda line: abs(line.error))
    sent = max((line for each in found for line in each.sent), key=lambda line: abs(line.error), default=None)
    return {
        "name": f"{case[1].name} {case[4]}",
        "ranks": case[1].world_size,
        "seconds": seconds,
        "memory": memory.what,
        "memory_error": memory.error,
        "sent_error": sent.error if sent is not None else 0.0,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a table; 0 if every goal is met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", type=int, help="the first N cases")
    given = parser.parse_args(arguments)
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    print(f"{'layout':44} {'ranks':>5} {'seconds':>8} {'worst memory':>13} {'':26} {'worst bytes sent':>16}")
    rows, met = [], True
    for case in CASES[: given.only]:
        found = row(case)
        rows.append(found)
        met = met and abs(found["memory_error"]) <= MEMORY_GOAL and found["sent_error"] == 0 and found["seconds"] <= SECONDS_GOAL
        print(
            f"{found['name']:44} {found['ranks']:5d} {found['seconds']:8.1f} {found['memory_error']:+13.1%} {found['memory']:26} "
            f"{found['sent_error']:+16.1%}",
            flush=True,
        )
    if given.json:
        entries = [
            {"name": f"{each['name']}: {what}", "value": abs(each[key]), "unit": unit, "goal": goal}
            for each in rows
            for what, key, unit, goal in (
                ("memory", "memory_error", "fraction", MEMORY_GOAL),
                ("sent", "sent_error", "fraction", 0.0),
                ("seconds", "seconds", "s", SECONDS_GOAL),
            )
        ]
        given.json.write_text(json.dumps(entries, indent=2))
    return 0 if met else 1


if __name__ == "__main__":
    raise SystemExit(main())
