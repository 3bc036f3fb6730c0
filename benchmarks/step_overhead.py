"""Our step through the Trainer beside the best hand-written torch loop of the same layout, alternating in the same processes.

    .venv/bin/python benchmarks/step_overhead.py [--rounds 7] [--steps 4] [--only TEXT] [--no-memory] [--json FILE]

A decoder of 6.7 M parameters, 16 sequences of 64 tokens a step, fp32, AdamW, gloo, one thread a process. A round is a block of
our steps, a block of the hand-written loop and one of a second copy of it (A/A: what the machine alone makes different), the last
two in changing order. `ratio` is the median over rounds of ours / hand-written; `A/A` the range of the two copies' ratio. Bytes
are those of the loopback device. The losses of both must agree within 1e-5. Memory is the peak resident set of separate processes
that run one of both only, and what of it came after their imports; what is freed there goes back to the system at once, so that
the peak is that of live memory and not of the allocator's luck.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import resource
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from bare_loops import LOOPS, SHAPE, Sizes
from grid_pool import Pool
from our_loop import train_ours

ROWS = 16
_M_MMAP_THRESHOLD = -3  # of malloc.h
WARM_UP = 3


@dataclass(frozen=True)
class Pair:
    """One layout: how ours is asked for, what it is compared with, and the goal of the ratio."""

    name: str
    sizes: Sizes
    strategy: dict[str, Any]
    peer: str
    goal: float

    @property
    def processes(self) -> int:
        return self.sizes.data * self.sizes.tensor * self.sizes.pipeline


def _pairs() -> list[Pair]:
    one, two, tensor = Sizes(), Sizes(data=2), Sizes(tensor=2)
    pairs = [Pair("single", one, {}, "single", 1.03), Pair("dp2 ddp", two, {}, "ddp", 1.03)]
    for stage in (1, 2):
        sharding = f"zero{stage}"
        pairs.append(Pair(f"dp2 {sharding}", two, {"sharding": sharding}, sharding, 1.08))
        pairs.append(Pair(f"dp2 {sharding} / ddp", two, {"sharding": sharding}, "ddp", 1.05))
    pairs.append(Pair("dp2 zero3", two, {"sharding": "zero3"}, "zero3", 1.08))
    split = {"tensor_parallel_size": 2}
    pairs.append(Pair("tp2", tensor, split, "tensor_one", 1.08))
    pairs.append(Pair("tp2 / obvious plan", tensor, split, "tensor_obvious", 0.93))
    pairs.append(Pair("tp2 sp", tensor, {**split, "sequence_parallel": True}, "tensor_sequence", 1.08))
    for data, count in ((1, 4), (1, 8), (2, 4)):
        sizes = Sizes(data=data, pipeline=2, num_microbatches=count)
        strategy = {"pipeline_parallel_size": 2, "schedule": "1F1B", "num_microbatches": count}
        name = f"{'dp2 ' if data > 1 else ''}pp2 m{count}"
        pairs.append(Pair(name, sizes, strategy, "pipeline", 1.03 if data == 1 else 1.08))
    return pairs


def _wire() -> int:
    """Bytes sent over the loopback device so far."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name.strip() == "lo":
            return int(rest.split()[8])
    return 0


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


@dataclass
class Block:
    """Seconds, CPU seconds and bytes of a block of steps, per step; the losses."""

    seconds: float
    cpu: float
    wire: float
    losses: list[float] = field(default_factory=list)


class Clock:
    """Measures blocks of steps between two barriers."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def start(self) -> None:
        _meet()
        self._at, self._cpu, self._wire = time.perf_counter(), _cpu(), _wire()

    def stop(self, losses: list[float]) -> Block:
        cpu = _cpu() - self._cpu
        _meet()
        seconds = time.perf_counter() - self._at
        return Block(seconds / self.steps, cpu / self.steps, (_wire() - self._wire) / self.steps, losses)


def _meet() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.barrier()


def _tokens(steps: int) -> Any:
    import torch

    return torch.randint(
        0, SHAPE.vocab_size, (steps * ROWS, SHAPE.sequence_length + 1), generator=torch.Generator().manual_seed(1)
    )


class BareRun:
    """One copy of the hand-written loop, on its own way through the batches."""

    def __init__(self, pair: Pair, tokens: Any, index: int) -> None:
        self._step, self._tokens, self._at = LOOPS[pair.peer](pair.sizes), tokens, 0
        self._share, self._index = ROWS // pair.sizes.data, index

    def run(self, count: int) -> list[float]:
        losses = []
        for _ in range(count):
            begin = self._at * ROWS + self._index * self._share
            rows = self._tokens[begin : begin + self._share]
            losses.append(self._step(rows[:, :-1], rows[:, 1:]).item())
            self._at += 1
        return losses


def worker(name: str, rounds: int, steps: int) -> list[list[Block]]:
    """Rounds of (ours, hand-written, second copy) on this rank."""
    import lightning.pytorch as pl

    pair = next(each for each in _pairs() if each.name == name)
    tokens = _tokens(WARM_UP + rounds * steps)

    class Alternate(pl.Callback):
        def __init__(self) -> None:
            self.found: list[list[Block]] = []
            self.losses: list[float] = []
            self.clock = Clock(steps)

        def on_train_start(self, trainer: Any, module: Any) -> None:
            index = trainer.strategy.groups.coordinate.data_parallel
            self.peers = [BareRun(pair, tokens, index) for _ in range(2)]

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.losses.append(outputs["loss"].item())
            done = batch_idx + 1 - WARM_UP
            if done == 0:
                for peer in self.peers:
                    peer.run(WARM_UP)
            elif done > 0 and done % steps == 0:
                ours = self.clock.stop(self.losses[-steps:])
                order = [0, 1] if len(self.found) % 2 == 0 else [1, 0]
                blocks = {each: self.measure(each) for each in order}
                self.found.append([ours, blocks[0], blocks[1]])
            if done >= 0 and done % steps == 0:
                self.clock.start()

        def measure(self, index: int) -> Block:
            self.clock.start()
            return self.clock.stop(self.peers[index].run(steps))

    callback = Alternate()
    train_ours(pair.strategy, pair.processes, (tokens, ROWS // pair.sizes.data), callback, WARM_UP + rounds * steps)
    return callback.found


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def memory_worker(name: str, ours: bool, steps: int) -> tuple[float, float]:
    """MiB of a rank's peak resident set when it runs one side only: before its first line, and in the end."""
    import lightning.pytorch as pl
    import torch
    import torch.distributed as dist

    import hybrid_strategy.strategy.hybrid  # noqa: F401  (imports are not what is measured)

    torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))]).step()  # imports what torch imports with the first step
    pair = next(each for each in _pairs() if each.name == name)
    tokens = _tokens(steps)
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 1 << 16)
    before = _peak()
    if ours:
        train_ours(pair.strategy, pair.processes, (tokens, ROWS // pair.sizes.data), pl.Callback(), steps)
    else:
        if pair.processes > 1:
            dist.init_process_group("gloo")
        index = int(os.environ["RANK"]) // (pair.processes // pair.sizes.data)
        BareRun(pair, tokens, index).run(steps)
    return before, _peak()


@dataclass
class Result:
    """What was measured of one pair."""

    pair: Pair
    ours: float
    bare: float
    ratio: float
    noise: tuple[float, float]
    wire: tuple[float, float]
    cpu: tuple[float, float]
    difference: float
    memory: tuple[tuple[float, float], tuple[float, float]] | None = None


def _judge(pair: Pair, ranks: list[list[list[Block]]]) -> Result:
    rounds = list(zip(*ranks, strict=True))  # [round][rank][variant]

    def slowest(each: Any, variant: int) -> float:
        return max(rank[variant].seconds for rank in each)

    def median(pick: Any) -> float:
        return statistics.median(pick(each) for each in rounds)

    ratios = [slowest(each, 0) / min(slowest(each, 1), slowest(each, 1)) for each in rounds]
    noise = [slowest(each, 2) / slowest(each, 1) for each in rounds]
    apart = 0.0
    last = [rank for rank in ranks if rank[0][1].losses[0] == rank[0][1].losses[0]]  # not-a-number: not the last stage
    for index in range(len(rounds)):
        wanted = [statistics.fmean(each) for each in zip(*(rank[index][1].losses for rank in last), strict=True)]
        got = ranks[0][index][0].losses
        apart = max([apart, *(abs(a - b) / b for a, b in zip(got, wanted, strict=True))])
    return Result(
        pair,
        median(lambda each: slowest(each, 0)),
        median(lambda each: slowest(each, 1)),
        statistics.median(ratios),
        (min(noise), max(noise)),
        (median(lambda each: each[0][0].wire), median(lambda each: each[0][1].wire)),
        (median(lambda each: max(r[0].cpu for r in each)), median(lambda each: max(r[1].cpu for r in each))),
        apart,
    )


def measure(pair: Pair, given: argparse.Namespace) -> Result:
    """Runs one pair in new processes."""
    pool = Pool()
    try:
        result = _judge(pair, pool.run(worker, pair.processes, pair.name, given.rounds, given.steps, timeout=600))
    finally:
        pool.close()
    if not given.no_memory:
        peaks = []
        for ours in (True, False):
            pool = Pool()
            try:
                found = pool.run(memory_worker, pair.processes, pair.name, ours, 5, timeout=300)
                peaks.append(max(found, key=lambda each: each[1]))
            finally:
                pool.close()
        result.memory = (peaks[0], peaks[1])
    return result


_HEAD = (
    f"{'layout':20} {'ours ms':>8} {'bare ms':>8} {'ratio':>6} {'goal':>5} {'A/A':>11} "
    f"{'MB':>6} {'bare':>6} {'idle':>5} {'bare':>5} {'dloss':>7}  peak MiB, bare"
)


def _line(found: Result) -> str:
    low, high = found.noise
    idle = [max(0.0, 1 - cpu / seconds) for cpu, seconds in zip(found.cpu, (found.ours, found.bare), strict=True)]
    memory = "" if found.memory is None else "  ".join(f"{peak:.0f} +{peak - before:.0f}" for before, peak in found.memory)
    return (
        f"{found.pair.name:20} {1e3 * found.ours:8.1f} {1e3 * found.bare:8.1f} {found.ratio:6.3f} {found.pair.goal:5.2f} "
        f"{low:5.2f}-{high:<5.2f} {found.wire[0] / 1e6:6.1f} {found.wire[1] / 1e6:6.1f} {idle[0]:5.2f} {idle[1]:5.2f} "
        f"{found.difference:7.0e}  {memory}"
    )


def _figures(found: Result) -> list[dict[str, Any]]:
    name = found.pair.name
    rows: list[tuple[str, float, str, str]] = [
        (f"{name}: step time ratio", found.ratio, "ours / hand-written", f"<= {found.pair.goal}"),
        (f"{name}: processor seconds of a rank", found.cpu[0] / found.cpu[1], "ours / hand-written", ""),
        (f"{name}: A/A spread", found.noise[1] - found.noise[0], "", ""),
        (f"{name}: wire bytes ratio", found.wire[0] / found.wire[1] if found.wire[1] else 1.0, "ours / hand-written", "<= 1"),
        (f"{name}: loss difference", found.difference, "relative", "<= 1e-5"),
    ]
    if found.memory is not None:
        (start, ours), (bare_start, bare) = found.memory
        rows.append((f"{name}: peak resident memory", ours / bare, "ours / hand-written", "<= 1.05"))
        grown = (ours - start) / (bare - bare_start)
        rows.append((f"{name}: peak over what the imports take", grown, "ours / hand-written", ""))
    return [{"name": name, "value": value, "unit": unit, "goal": goal} for name, value, unit, goal in rows]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, prints, writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="alternations")
    parser.add_argument("--steps", type=int, default=4, help="steps of a block")
    parser.add_argument("--only", help="layouts whose name holds this text only")
    parser.add_argument("--no-memory", action="store_true", help="leave the peak of memory out")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    given = parser.parse_args(arguments)
    print(_HEAD)
    figures = []
    for pair in _pairs():
        if given.only is None or given.only in pair.name:
            found = measure(pair, given)
            print(_line(found), flush=True)
            figures += _figures(found)
    if given.json:
        given.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
