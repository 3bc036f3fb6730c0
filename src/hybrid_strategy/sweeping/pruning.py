"""What the planner says of each layout: those that cannot fit or cannot win are set aside, with the reason.

Cheap bounds come first: states alone against the memory, the FLOPs and the bubble against the best forecast so far.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby

from hybrid_strategy.planning.flops import training_flops_per_token
from hybrid_strategy.planning.layouts import find_schedule
from hybrid_strategy.planning.memory import likely_peak_ledger, states_bytes_per_parameter
from hybrid_strategy.planning.numerics import NUMERICS, Numerics
from hybrid_strategy.planning.scenario import Scenario
from hybrid_strategy.planning.stacks import ENGINE, Stack, stack_for
from hybrid_strategy.planning.step_time import StepModel
from hybrid_strategy.spec.cluster import ClusterSpec
from hybrid_strategy.spec.layout import Layout
from hybrid_strategy.spec.model_shape import ModelShape
from hybrid_strategy.sweeping.layouts import Candidate, Found, Skipped
from hybrid_strategy.units import format_bytes, format_seconds

_RECOMPUTED = {"none": 1.0, "selective": 1.0, "full": 4.0 / 3.0}
"""Least computation of a step by kind of activation checkpoint: a whole forward pass more under `full`."""


@dataclass(frozen=True)
class Judge:
    """What the layouts are judged by.

    Attributes:
        slack: a layout whose forecast is so many times the best one cannot win.
        dominate: drop a heavier activation checkpoint where a lighter one fits; not where the user asked for both.
    """

    shape: ModelShape
    cluster: ClusterSpec
    numerics: Numerics = NUMERICS["fp32"]
    slack: float = 1.5
    dominate: bool = True
    stack: Stack = field(default=ENGINE)

    def scenario(self, candidate: Candidate) -> Scenario:
        stack = stack_for(candidate.layout.compile, self.stack)
        return Scenario(self.shape, candidate.layout, candidate.batch, self.cluster, self.numerics, stack)

    def least_seconds(self, candidate: Candidate) -> float:
        """No layout of this schedule is faster: every FLOP at the rate of a large product, and the bubble."""
        layout, batch, cluster = candidate.layout, candidate.batch, self.cluster
        stack = stack_for(layout.compile, self.stack)
        rate = cluster.peak_fp8_flops if self.numerics.fp8 and cluster.peak_fp8_flops else cluster.peak_flops
        flops = training_flops_per_token(self.shape) * batch.global_batch_size * self.shape.sequence_length
        busy = flops / layout.world_size / (rate * stack.efficiency) * _RECOMPUTED[layout.activation_checkpoint]
        sizes = (layout.pipeline_parallel_size, layout.stages_per_rank, batch.num_microbatches)
        bubble = find_schedule(layout.schedule).bubble_fraction(*sizes) if sizes[0] > 1 else 0.0
        return busy / (1 - bubble)

    def all_of(self, found: Iterable[Found]) -> tuple[list[Judged], list[Skipped]]:
        """Every layout with its forecast, fastest first: nothing is set aside but what is refused."""
        judged, skipped = [], []
        for each in found:
            if isinstance(each, Skipped):
                skipped.append(each)
                continue
            scenario = self.scenario(each)
            seconds = StepModel(scenario).step_time(play=False).step_seconds
            judged.append(Judged(each, likely_peak_ledger(scenario).total_bytes, seconds))
        return sorted(judged, key=lambda one: one.step_seconds or 0.0), skipped


@dataclass(frozen=True)
class Judged:
    """A layout with its forecast. `step_seconds` is None where it was not needed."""

    candidate: Candidate
    memory_bytes: float
    step_seconds: float | None = None


def prune(found: Iterable[Found], judge: Judge) -> tuple[list[Judged], list[Skipped]]:
    """Those that fit and may win, fastest forecast first, and all others with the reason."""
    fitting: list[Judged] = []
    skipped: list[Skipped] = []
    for each in _fits(found, judge):
        if isinstance(each, Judged):
            fitting.append(each)
        else:
            skipped.append(each)
    winners, losers = _fastest(fitting, judge)
    return winners, skipped + losers


def _fits(found: Iterable[Found], judge: Judge) -> Iterator[Judged | Skipped]:
    """Memory; the layouts that differ in what is recomputed stand together, lightest first."""
    hopeless: dict[tuple[object, ...], str | None] = {}
    for _, alike in groupby(found, key=_but_recomputation):
        lighter: str | None = None
        for each in alike:
            if isinstance(each, Skipped):
                yield each
                continue
            kind = each.layout.activation_checkpoint
            if lighter is not None:
                reason = f"activation_checkpoint {lighter} fits, and {kind} only costs time"
                yield Skipped(each.layout.name, "time", reason, each.values)
                continue
            judged = _fit(each, judge, hopeless)
            if isinstance(judged, Judged) and judge.dominate:
                lighter = kind
            yield judged


def _but_recomputation(found: Found) -> tuple[object, ...]:
    if isinstance(found, Skipped):
        return (id(found),)
    layout = found.layout
    return (layout.axis_sizes, layout.sharding, layout.sequence_parallel, layout.schedule, layout.stages_per_rank, found.batch)


def _fit(candidate: Candidate, judge: Judge, hopeless: dict[tuple[object, ...], str | None]) -> Judged | Skipped:
    layout, scenario = candidate.layout, judge.scenario(candidate)
    key = (layout.axis_sizes, layout.sharding, layout.stages_per_rank)
    if key not in hopeless:
        hopeless[key] = _states_too_large(layout, scenario)
    reason = hopeless[key]
    if reason is None:
        ledger = likely_peak_ledger(scenario, stop_above=True)
        if ledger.fits:
            return Judged(candidate, ledger.total_bytes)
        category, largest = max(ledger.by_category.items(), key=lambda item: item[1])
        reason = (
            f"{format_bytes(ledger.total_bytes)} on pipeline rank {ledger.pipeline_rank} do not fit "
            f"{format_bytes(ledger.memory_bytes)}; most are {category}, {format_bytes(largest)}"
        )
    return Skipped(layout.name, "memory", reason, candidate.values)


def _states_too_large(layout: Layout, scenario: Scenario) -> str | None:
    """States of the fullest rank against the whole memory, whatever the micro-batches."""
    each = states_bytes_per_parameter(scenario.numerics, layout.sharding, layout.state_shards)
    ranks = {0, layout.pipeline_parallel_size - 1}
    needed, memory = max(each * scenario.rank_parameters(rank) for rank in ranks), scenario.cluster.memory_bytes
    if needed <= memory:
        return None
    return f"weights, gradients and optimizer states alone are {format_bytes(needed)} of {format_bytes(memory)}"


def _fastest(fitting: list[Judged], judge: Judge) -> tuple[list[Judged], list[Skipped]]:
    """Forecasts in the order of their lower bounds, until no bound can beat the best any more."""
    bounded = sorted(((judge.least_seconds(each.candidate), number) for number, each in enumerate(fitting)))
    best = float("inf")
    timed: list[tuple[float, Judged]] = []
    skipped: list[Skipped] = []
    for least, number in bounded:
        each = fitting[number]
        if least > best * judge.slack:
            skipped.append(_slow(each, least, best, "at least "))
            continue
        seconds = StepModel(judge.scenario(each.candidate)).step_time(play=False).step_seconds
        best = min(best, seconds)
        timed.append((seconds, Judged(each.candidate, each.memory_bytes, seconds)))
    timed.sort(key=lambda item: item[0])
    skipped += [_slow(each, seconds, best, "") for seconds, each in timed if seconds > best * judge.slack]
    return [each for seconds, each in timed if seconds <= best * judge.slack], skipped


def _slow(judged: Judged, seconds: float, best: float, least: str) -> Skipped:
    reason = f"forecast {least}{format_seconds(seconds)} a step, {seconds / best:.1f} x the best ({format_seconds(best)})"
    return Skipped(judged.candidate.layout.name, "time", reason, judged.candidate.values)


def take_best(judged: list[Judged], count: int) -> tuple[list[Judged], list[Skipped]]:
    """The `count` fastest by forecast; the list is in that order."""
    rest = [
        Skipped(each.candidate.layout.name, "rank", f"place {place} by forecast, {count} are run", each.candidate.values)
        for place, each in enumerate(judged[count:], start=count + 1)
    ]
    return judged[:count], rest


def by_kind(skipped: Iterable[Skipped]) -> Mapping[str, int]:
    """How many points were skipped for what kind of reason."""
    counts: dict[str, int] = {}
    for each in skipped:
        counts[each.kind] = counts.get(each.kind, 0) + each.count
    return counts
