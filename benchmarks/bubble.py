"""Idle share of pipeline ranks, measured, beside the schedule table's own simulation with the pass times of the same run.

    .venv/bin/python benchmarks/bubble.py [--stages 2 4] [--microbatches 4 8 16] [--only TEXT] [--steps 8] [--json FILE]

A decoder of 6.7 M parameters, 64 tokens a sequence, fp32, gloo, one thread a process. A rank is idle while
it waits for a message.
`simulated` plays the table with the median time of each stage's forward, backward (or input and weight) passes; `closed` is the
table under unit costs. Where there are fewer cores than ranks, a rank that computes takes the core of another: pass times and
waiting hold that, so those rows are stated, not judged.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from bare_loops import SHAPE
from grid_pool import Pool, RefusedError
from our_loop import train_ours

SCHEDULES = {
    "GPipe": 1,
    "1F1B": 1,
    "Interleaved1F1B": 2,
    "LoopedBFS": 2,
    "InterleavedZeroBubble": 2,
    "ZBVZeroBubble": 2,
    "DualPipeV": 2,
}
"""Schedule -> stages per rank."""

GOAL_POINTS = 5.0
WARM_UP = 3
ROWS_PER_MICROBATCH = 4


class Watch:
    """Times the cells of one rank, and what it waits inside them."""

    def __init__(self) -> None:
        from hybrid_strategy.parallel import player

        self.cells: dict[tuple[int, str], list[float]] = defaultdict(list)
        self.idle: list[float] = []
        self.active = False
        self._waited = 0.0
        watch, run, transport, play = self, player._Run, player.Transport, player.Player

        def timed_cell(this: Any, cell: Any) -> None:
            before, begin = watch._waited, time.perf_counter()
            original_cell(this, cell)
            watch.cells[cell.stage, cell.kind].append(time.perf_counter() - begin - (watch._waited - before))

        def timed_receive(this: Any, message: Any) -> Any:
            begin = time.perf_counter()
            value = original_receive(this, message)
            watch._waited += time.perf_counter() - begin
            return value

        def timed_play(this: Any, table: Any, *rest: Any) -> None:
            # all ranks begin together, and a rank's step ends when the last one's does: that is what the table's bubble is of
            import torch.distributed as dist

            dist.barrier()
            watch._waited, begin = 0.0, time.perf_counter()
            original_play(this, table, *rest)
            done = time.perf_counter()
            dist.barrier()
            end = time.perf_counter()
            watch.idle.append((watch._waited + end - done) / (end - begin))

        original_cell, original_receive, original_play = run.cell, transport.receive, play.play
        run.cell, transport.receive, play.play = timed_cell, timed_receive, timed_play  # type: ignore[method-assign]
        self._undo = lambda: self._restore(run, transport, play, (original_cell, original_receive, original_play))

    @staticmethod
    def _restore(run: Any, transport: Any, play: Any, originals: tuple[Any, Any, Any]) -> None:
        run.cell, transport.receive, play.play = originals

    def close(self) -> None:
        self._undo()

    def restart(self) -> None:
        self.cells.clear()
        self.idle.clear()


def worker(schedule: str, stages: int, count: int, steps: int) -> tuple[list[float], dict[tuple[int, str], float]]:
    """This rank's idle share of every step, and its median pass times."""
    import lightning.pytorch as pl
    import torch

    class Warm(pl.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx + 1 == WARM_UP:
                watch.restart()

    rows = count * ROWS_PER_MICROBATCH
    tokens = torch.randint(0, SHAPE.vocab_size, ((WARM_UP + steps) * rows, SHAPE.sequence_length + 1))
    strategy = {
        "pipeline_parallel_size": stages,
        "schedule": schedule,
        "stages_per_rank": SCHEDULES[schedule],
        "num_microbatches": count,
    }
    watch = Watch()
    try:
        train_ours(strategy, stages, (tokens, rows), Warm(), WARM_UP + steps)
    finally:
        watch.close()
    return watch.idle, {key: statistics.median(times) for key, times in watch.cells.items()}


def _simulated(schedule: str, stages: int, count: int, times: dict[tuple[int, str], float] | None) -> float:
    """Idle share of the table over all ranks, in percent."""
    from hybrid_strategy.planning.layouts import find_schedule
    from hybrid_strategy.planning.simulate import PassCosts, simulate

    table = find_schedule(schedule).build(stages, SCHEDULES[schedule], count)
    costs: dict[int, dict[str, float]] = defaultdict(dict)
    for (stage, kind), seconds in (times or {}).items():
        costs[stage][kind] = seconds
    return 100 * simulate(table, PassCosts(costs)).bubble_fraction


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, prints, writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 4], help="pipeline ranks")
    parser.add_argument("--microbatches", type=int, nargs="+", default=[4, 8, 16], help="micro-batches of a step")
    parser.add_argument("--only", help="schedules whose name holds this text only")
    parser.add_argument("--steps", type=int, default=8, help="measured steps")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    given = parser.parse_args(arguments)
    print(f"{'schedule':22} {'pp':>3} {'m':>3} {'closed %':>9} {'simulated %':>12} {'measured %':>11} {'points':>7}")
    figures, pool = [], Pool()
    try:
        for schedule in SCHEDULES:
            if given.only is not None and given.only not in schedule:
                continue
            for stages in given.stages:
                for count in given.microbatches:
                    figures += _row(pool, schedule, stages, count, given.steps)
    finally:
        pool.close()
    if given.json:
        given.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 0


def _row(pool: Pool, schedule: str, stages: int, count: int, steps: int) -> list[dict[str, Any]]:
    try:
        ranks = pool.run(worker, stages, schedule, stages, count, steps, timeout=300)
    except RefusedError as refused:
        print(f"{schedule:22} {stages:3} {count:3} refused: {refused}")
        return []
    times = {key: seconds for _, own in ranks for key, seconds in own.items()}
    measured = 100 * statistics.median(statistics.fmean(each) for each in zip(*(idle for idle, _ in ranks), strict=True))
    simulated, judged = _simulated(schedule, stages, count, times), stages <= (os.cpu_count() or 1)
    closed = _simulated(schedule, stages, count, None)
    points = measured - simulated
    mark = "" if judged else "  fewer cores than ranks: stated"
    print(f"{schedule:22} {stages:3} {count:3} {closed:9.1f} {simulated:12.1f} {measured:11.1f} {points:7.1f}{mark}", flush=True)
    goal = f"<= {GOAL_POINTS:g}" if judged else ""
    return [
        {
            "name": f"{schedule} pp{stages} m{count}: idle, off its simulation",
            "value": abs(points),
            "unit": "points",
            "goal": goal,
        }
    ]


if __name__ == "__main__":
    sys.exit(main())
