"""All layouts of a run, those that fit, the fastest first.

Enumeration with pruning: sizes that do not divide are never made; a heavier sharding or checkpoint is tried only where a lighter
one does not fit, since it can only be slower; where the states alone exceed the memory nothing smaller is looked at.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from hybrid_strategy.errors import LayoutError, NoLayoutFitsError, message
from hybrid_strategy.planning.choices import context_sizes, divisors
from hybrid_strategy.planning.forecast import Forecast, forecast
from hybrid_strategy.planning.layouts import check_layout, find_schedule
from hybrid_strategy.planning.memory import likely_peak_ledger, states_bytes_per_parameter
from hybrid_strategy.planning.numerics import NUMERICS, Numerics
from hybrid_strategy.planning.scenario import Scenario
from hybrid_strategy.planning.stacks import ENGINE, Stack, stack_for
from hybrid_strategy.planning.step_time import StepModel
from hybrid_strategy.spec.batch import BatchSpec
from hybrid_strategy.spec.cluster import ClusterSpec
from hybrid_strategy.spec.layout import ACTIVATION_CHECKPOINTS, Layout
from hybrid_strategy.spec.ledger import MemoryLedger
from hybrid_strategy.spec.model_shape import ModelShape

PLAYED = 6
"""So many of the fastest are timed again by playing their tables."""

MICRO_BATCHES = (1, 2, 4, 8, 16, 32, 64)
STAGES_PER_RANK = (2, 3, 4, 6, 8)

UNEVEN = 1.15
"""The largest stage of an interleaved pipeline may hold so many times the mean."""

NEARLY = 1.03
"""Step times closer than this are not told apart: the layout that splits the model less is chosen, then that with less memory."""


@dataclass(frozen=True)
class Question:
    """What is asked.

    Attributes:
        fixed: what the user has set: fields of `Layout`, `micro_batch_size`, `num_microbatches`, `accumulate_grad_batches`,
            `stage_layers` (blocks of each stage, which fixes their number).
        world_size: processes; 0: all GPUs of the cluster.
    """

    shape: ModelShape
    cluster: ClusterSpec
    global_batch_size: int
    numerics: Numerics = NUMERICS["mixed"]
    stack: Stack = ENGINE
    fixed: Mapping[str, Any] = field(default_factory=dict)
    world_size: int = 0

    @property
    def processes(self) -> int:
        return self.world_size or self.cluster.num_gpus

    def scenario(self, layout: Layout, micro_batch_size: int) -> Scenario:
        accumulate = int(self.fixed.get("accumulate_grad_batches", 1))
        rows = self.global_batch_size // (layout.data_parallel_size * accumulate)
        pieces = int(self.fixed.get("num_microbatches") or max(1, rows // micro_batch_size))
        batch = BatchSpec(self.global_batch_size, pieces, accumulate)
        stages = tuple(self.fixed.get("stage_layers", ()))
        cut = stages if len(stages) == layout.num_stages else ()
        layout = replace(layout, compile=bool(self.fixed.get("compile", layout.compile)))
        stack = stack_for(layout.compile, self.stack)
        return Scenario(self.shape, layout, batch, self.cluster, self.numerics, stack, stage_layers=cut)

    def choices(self, key: str, usual: Iterable[Any]) -> tuple[Any, ...]:
        """What is tried of one axis: what the user has set, else the usual values."""
        given = self.fixed.get(key)
        return tuple(usual) if given in (None, "auto") else (given,)


@dataclass(frozen=True)
class Misfit:
    """A layout that does not fit, with the ledger of its fullest rank."""

    scenario: Scenario
    ledger: MemoryLedger


@dataclass(frozen=True)
class SearchResult:
    """What the search found: `forecasts` fit, the chosen one first, then the fastest of each set of sizes and sharding; `misfits`
    do not fit, least memory first."""

    question: Question
    forecasts: tuple[Forecast, ...]
    misfits: tuple[Misfit, ...]
    examined: int

    @cached_property
    def winner(self) -> Forecast:
        """The fastest layout that fits.

        Raises:
            NoLayoutFitsError: there is none.
        """
        if not self.forecasts:
            raise NoLayoutFitsError(_nothing_fits(self))
        return self.forecasts[0]


def search(question: Question) -> SearchResult:
    """All layouts of a run that fit, fastest first."""
    found: list[tuple[float, Scenario]] = []
    misfits: list[Misfit] = []
    examined = 0
    too_large: dict[Layout, int] = {}
    for layout, micro_batch in _sizes(question):
        if micro_batch >= too_large.get(layout, micro_batch + 1):
            continue
        fits = False
        for scenario, ledger in _lightest(question, layout, micro_batch):
            fits = fits or ledger.fits
            examined += 1
            if ledger.fits:
                found.append((StepModel(scenario).step_time(play=False).step_seconds, scenario))
            else:
                misfits.append(Misfit(scenario, ledger))
        if not fits:
            too_large[layout] = micro_batch
    found.sort(key=lambda each: each[0])
    misfits.sort(key=lambda each: each.ledger.total_bytes)
    distinct = _distinct(question, found)
    played = [forecast(scenario) for scenario in distinct[:PLAYED]]
    played.sort(key=lambda each: each.step_seconds)
    if played:
        equal = [each for each in played if each.step_seconds <= NEARLY * played[0].step_seconds]
        chosen = min(equal, key=_simplicity)
        played = [chosen, *(each for each in played if each is not chosen)]
    rest = [forecast(scenario, play=False) for scenario in distinct[PLAYED:]]
    return SearchResult(question, (*played, *rest), tuple(misfits), examined)


def _simplicity(found: Forecast) -> tuple[float, ...]:
    """Ways in which the model itself is split, then memory."""
    layout = found.scenario.layout
    return layout.tensor_parallel_size * layout.pipeline_parallel_size, found.ledger.total_bytes


def _distinct(question: Question, found: list[tuple[float, Scenario]]) -> list[Scenario]:
    """The fastest of each set of sizes and sharding, without those that the engine refuses."""
    kept: dict[tuple[object, ...], Scenario] = {}
    for _, scenario in found:
        key = (*scenario.layout.axis_sizes, scenario.layout.sharding)
        if key not in kept and _is_allowed(question, scenario):
            kept[key] = scenario
    return list(kept.values())


def _is_allowed(question: Question, scenario: Scenario) -> bool:
    try:
        check_layout(scenario.layout, shape=question.shape, batch=scenario.batch, gpus_per_node=question.cluster.domain_size)
    except LayoutError:
        return False
    return True


# -- enumeration ----------------------------------------------------------------------------------------------------------


def _sizes(question: Question) -> Iterator[tuple[Layout, int]]:
    """Every set of sizes, schedule and micro-batch; sharding and checkpoint are still the lightest."""
    shape, world = question.shape, question.processes
    for tensor in question.choices("tensor_parallel_size", _tensor_sizes(question)):
        for context in question.choices("context_parallel_size", context_sizes(world, shape.sequence_length)):
            left = world // (tensor * context)
            if tensor * context * left != world:
                continue
            for pipeline in question.choices("pipeline_parallel_size", divisors(left)):
                data = left // pipeline
                if data * pipeline != left or pipeline > shape.num_layers or question.global_batch_size % data:
                    continue
                if question.fixed.get("data_parallel_size", data) not in (data, "auto"):
                    continue
                base = Layout(
                    data_parallel_size=data,
                    tensor_parallel_size=tensor,
                    pipeline_parallel_size=pipeline,
                    context_parallel_size=context,
                    sequence_parallel=tensor > 1 and bool(question.fixed.get("sequence_parallel", True)),
                    compile=bool(question.fixed.get("compile")),
                )
                yield from _scheduled(question, base)


def _tensor_sizes(question: Question) -> list[int]:
    """Divisors of the heads whose groups all stay inside the node (or the NVLink domain)."""
    shape, sequence, domain = question.shape, question.shape.sequence_length, question.cluster.domain_size
    heads = [size for size in divisors(shape.kv_heads) if shape.num_attention_heads % size == 0 and sequence % size == 0]
    inside = [size for size in heads if size <= domain and (domain % size == 0 or question.processes <= domain)]
    return [size for size in inside if question.processes % size == 0]


def _scheduled(question: Question, base: Layout) -> Iterator[tuple[Layout, int]]:
    accumulate = int(question.fixed.get("accumulate_grad_batches", 1))
    rows = question.global_batch_size // (base.data_parallel_size * accumulate)
    if rows < int(question.fixed.get("num_microbatches") or 1):
        return
    pipeline = base.pipeline_parallel_size
    stages = len(question.fixed.get("stage_layers", ()))
    for schedule, chunks in _schedules(question, pipeline):
        if stages and stages != pipeline * chunks:
            continue
        layout = replace(base, schedule=schedule, stages_per_rank=chunks)
        for micro in _micro_batches(question, rows):
            m = int(question.fixed.get("num_microbatches") or rows // micro)
            if pipeline > 1 and m < pipeline and micro > 1:
                continue
            if schedule == "Interleaved1F1B" and m % pipeline:
                continue
            yield layout, micro


def _micro_batches(question: Question, rows: int) -> list[int]:
    given = question.fixed.get("micro_batch_size")
    if question.fixed.get("num_microbatches"):
        given = -(-rows // int(question.fixed["num_microbatches"]))
    return [int(given)] if given else [size for size in MICRO_BATCHES if rows % size == 0]


def _schedules(question: Question, pipeline: int) -> Iterator[tuple[str, int]]:
    layers, wanted = question.shape.num_layers, question.fixed.get("schedule")
    given = question.fixed.get("stages_per_rank")
    if pipeline == 1:
        if (given or 1) == 1:
            yield wanted or "1F1B", 1
        return
    for name, counts in (("1F1B", (1,)), ("Interleaved1F1B", STAGES_PER_RANK), ("ZBVZeroBubble", (2,))):
        if wanted is None or wanted.lower() == name.lower():
            stages = (given,) if given else counts
            yield from ((name, chunks) for chunks in stages if _even_enough(layers, pipeline * chunks, 1 if given else chunks))
            wanted = None if wanted is None else "(found)"
    if wanted not in (None, "(found)"):
        chunks = given or find_schedule(wanted).default_stages_per_rank
        if pipeline * chunks <= layers:
            yield wanted, chunks


def _even_enough(layers: int, stages: int, chunks: int) -> bool:
    """Interleaving pays only while its stages do not get more uneven than the bubble it saves."""
    return stages <= layers and (chunks == 1 or -(-layers // stages) * stages <= UNEVEN * layers)


def _shardings(question: Question, layout: Layout) -> Iterator[Layout]:
    """Lightest first. Up to `zero2` sharding costs no more than plain data parallelism, so `ddp` comes in only if asked for; so
    does `zero2` where it holds as much as `zero1`."""
    data = layout.data_parallel_size
    usual: tuple[str, ...] = ("zero1", "zero3") if question.stack.plain_sharding else ("zero1", "zero2", "zero3")
    usual = usual if data * layout.context_parallel_size > 1 else ("ddp",)
    for sharding in question.choices("sharding", usual):
        groups = [1]
        inside = max(1, question.cluster.domain_size // layout.tensor_parallel_size)
        if sharding == "zero3" and 1 < inside < data and data % inside == 0:
            groups.insert(0, data // inside)
        for replicas in question.choices("data_parallel_replicate_size", groups if sharding == "zero3" else (1,)):
            if sharding != "ddp" and data % replicas:
                continue
            yield replace(layout, sharding=sharding, data_parallel_replicate_size=replicas if sharding != "ddp" else 1)


def _lightest(question: Question, layout: Layout, micro_batch: int) -> Iterator[tuple[Scenario, MemoryLedger]]:
    """Sharding and checkpoint from light to heavy, until one without recomputation fits."""
    for sharded in _shardings(question, layout):
        scenario = question.scenario(sharded, micro_batch)
        share = states_bytes_per_parameter(question.numerics, sharded.sharding, sharded.state_shards)
        hopeless = share * scenario.rank_parameters(0) > question.cluster.memory_bytes
        kinds = question.choices("activation_checkpoint", ACTIVATION_CHECKPOINTS)
        for kind in kinds[-1:] if hopeless else kinds:
            tried = replace(scenario, layout=replace(sharded, activation_checkpoint=kind))
            ledger = likely_peak_ledger(tried, stop_above=True)
            yield tried, ledger
            if ledger.fits:
                break
        if ledger.fits and kind == kinds[0]:
            return


def _nothing_fits(result: SearchResult) -> str:
    question = result.question
    least = result.misfits[0].ledger.total_bytes / 2**30 if result.misfits else 0.0
    memory = question.cluster.memory_bytes / 2**30
    numbers = f"{result.examined} layouts examined; the least needs {least:,.1f} GiB of {memory:,.1f} on each GPU"
    advice = "Set more nodes, a shorter sequence or a lighter precision (`hybrid plan` names the cheapest that fits)"
    return message("cluster.num_nodes", question.cluster.num_nodes, "no layout fits its memory", numbers, advice)
