"""Why a layout lost, in one line each; and what would make a model fit where nothing does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from hybrid_strategy.planning.choices import divisors
from hybrid_strategy.planning.forecast import Forecast, forecast
from hybrid_strategy.planning.numerics import NUMERICS
from hybrid_strategy.planning.placement import Placement
from hybrid_strategy.planning.search import Question, SearchResult, search
from hybrid_strategy.planning.step_time import StepTime
from hybrid_strategy.spec.layout import Layout
from hybrid_strategy.spec.ledger import MemoryLedger
from hybrid_strategy.units import GIB, format_seconds

_WORDS = {
    "compute_seconds": "smaller products",
    "recompute_seconds": "recomputation",
    "launch_seconds": "launching small kernels",
    "tensor_parallel_seconds": "tensor-parallel messages",
    "context_parallel_seconds": "context-parallel messages",
    "pipeline_send_seconds": "pipeline messages",
    "bubble_seconds": "bubble",
    "data_parallel_seconds": "exposed gradient and weight messages",
    "optimizer_seconds": "optimizer",
    "overhead_seconds": "overhead",
}

SLOWER = 1.005
"""A change that makes the step longer by less than this is not worth a line."""

_STATES = ("parameters", "gradients", "optimizer", "copies")


@dataclass(frozen=True)
class Loser:
    """A layout that was not chosen: what differs from the winner, why it lost, and its forecast."""

    change: str
    reason: str
    forecast: Forecast | None = None


def why_slower(loser: StepTime, winner: StepTime) -> str:
    """The two parts that grew most.

    >>> base = StepTime(10, 0, 0, 1, 0, 0, 0, 0, 0, 0)
    >>> why_slower(StepTime(10, 3, 0, 1, 0, 0, 0.5, 0, 0, 0), base)
    '+32 %: recomputation +3 s, bubble +500 ms'
    """
    grown = {each.name: getattr(loser, each.name) - getattr(winner, each.name) for each in fields(StepTime)}
    largest = sorted(grown, key=lambda name: -grown[name])[:2]
    more = loser.step_seconds / winner.step_seconds - 1
    parts = [
        f"{_WORDS[name]} +{format_seconds(grown[name])}" for name in largest if grown[name] > 0.1 * more * winner.step_seconds
    ]
    return f"{more:+.0%}".replace("%", " %") + (f": {', '.join(parts)}" if parts else "")


def why_too_large(ledger: MemoryLedger) -> str:
    """Total against the memory, and the largest kind of it.

    >>> from hybrid_strategy.spec.ledger import LedgerLine
    >>> why_too_large(MemoryLedger(0, (0,), (LedgerLine("w", "parameters", 128 * GIB, "", ""),), 80 * GIB))
    'does not fit: 128.0 GiB of 80.0 GiB, 128.0 GiB of states'
    """
    kinds = {"states": ledger.of(*_STATES), "activations": ledger.of("activations"), "logits": ledger.of("logits")}
    name = max(kinds, key=lambda each: kinds[each])
    total, memory = ledger.total_bytes / GIB, ledger.memory_bytes / GIB
    return f"does not fit: {total:,.1f} GiB of {memory:,.1f} GiB, {kinds[name] / GIB:,.1f} GiB of {name}"


def losers(result: SearchResult) -> list[Loser]:
    """The winner with one thing changed at a time, and why that is worse; changes that are no worse are left out."""
    winner = result.winner
    found: list[Loser] = []
    for change, layout, micro_batch in _changes(result.question, winner):
        tried = forecast(result.question.scenario(layout, micro_batch), play=False)
        if not tried.fits:
            found.append(Loser(change, why_too_large(tried.ledger), tried))
        elif tried.step_seconds > SLOWER * winner.step_seconds:
            leaves = Placement(layout, result.question.cluster).link("tensor_parallel").level == "inter_node"
            reason = "leaves the node; " if leaves else ""
            found.append(Loser(change, reason + why_slower(tried.step, winner.step), tried))
    return found


def _changes(question: Question, winner: Forecast) -> Iterator[tuple[str, Layout, int]]:
    """Layouts that differ from the winner in one size (data parallelism takes up the rest) or in one word."""
    layout, micro = winner.scenario.layout, winner.scenario.micro_batch_size
    shape, world = question.shape, question.processes
    for size in (size for size in divisors(shape.num_attention_heads) if size <= 2 * question.cluster.domain_size):
        changed = replace(layout, tensor_parallel_size=size, sequence_parallel=size > 1)
        yield from _refilled(question, f"tp={size}", changed, micro, size == layout.tensor_parallel_size)
    for size in (layout.pipeline_parallel_size // 2, 2 * layout.pipeline_parallel_size):
        if 1 <= size <= shape.num_layers and world % size == 0:
            chunks = layout.stages_per_rank if 1 < size * layout.stages_per_rank <= shape.num_layers and size > 1 else 1
            schedule = layout.schedule if chunks > 1 or size > 1 else "1F1B"
            schedule = "1F1B" if chunks == 1 else schedule
            changed = replace(layout, pipeline_parallel_size=size, stages_per_rank=chunks, schedule=schedule)
            yield from _refilled(question, f"pp={size}", changed, micro, False)
    for sharding in ("ddp", "zero1", "zero2", "zero3"):
        if sharding != layout.sharding and layout.data_parallel_size * layout.context_parallel_size > 1:
            yield f"{sharding}", replace(layout, sharding=sharding, data_parallel_replicate_size=1), micro
    for kind in ("none", "selective", "full"):
        if kind != layout.activation_checkpoint:
            yield f"activation_checkpoint={kind}", replace(layout, activation_checkpoint=kind), micro
    rows = winner.scenario.batch.rank_batch_size(layout.data_parallel_size)
    for size in (micro // 2, 2 * micro):
        if size >= 1 and rows % size == 0:
            yield f"micro_batch_size={size}", layout, size


def _refilled(question: Question, change: str, layout: Layout, micro: int, same: bool) -> Iterator[tuple[str, Layout, int]]:
    """The layout with data parallelism filling the processes, where that is possible."""
    inner = layout.tensor_parallel_size * layout.pipeline_parallel_size * layout.context_parallel_size
    data, rest = divmod(question.processes, inner)
    if same or rest or question.global_batch_size % (data * micro):
        return
    sharding = layout.sharding if data * layout.context_parallel_size > 1 else "ddp"
    yield change, replace(layout, data_parallel_size=data, sharding=sharding, data_parallel_replicate_size=1), micro


@dataclass(frozen=True)
class Relief:
    """A change after which the model fits: overrides to paste, and the forecast with them."""

    overrides: tuple[str, ...]
    forecast: Forecast


def reliefs(question: Question) -> list[Relief]:
    """The cheapest changes that make the model fit, one of each kind: freed settings, nodes, sequence, precision."""
    kinds = (_freed(question), _more_nodes(question), _shorter(question), _lighter(question))
    found = []
    for kind in kinds:
        for overrides, changed in kind:
            result = search(changed)
            if result.forecasts:
                found.append(Relief(overrides, result.winner))
                break
    return found


_NO_LAYOUT = ("accumulate_grad_batches", "compile")
"""What a user sets for other reasons than where the model lies."""

_USUAL = {
    "data_parallel_size": "auto",
    "context_parallel_size": "1",
    "data_parallel_replicate_size": "1",
    "sequence_parallel": "false",
    "stages_per_rank": "null",
    "num_microbatches": "null",
    "stage_cuts": "null",
}
"""Settings that `strategy_overrides` leaves out, and how each is set back."""

_TOLD_AS = {"stage_cuts": "stage_layers"}


def _freed(question: Question) -> Iterator[tuple[tuple[str, ...], Question]]:
    """Without what the user has fixed of the layout; what the winner does not set is set back."""
    kept = {key: value for key, value in question.fixed.items() if key in _NO_LAYOUT}
    if len(kept) < len(question.fixed):
        free = replace(question, fixed=kept)
        result = search(free)
        if result.forecasts:
            words = strategy_overrides(result.winner)
            named = {word.partition("=")[0] for word in words}
            back = [f"strategy.{key}={usual}" for key, usual in _USUAL.items() if question.fixed.get(_TOLD_AS.get(key, key))]
            yield (*words, *(word for word in back if word.partition("=")[0] not in named)), free


def _more_nodes(question: Question) -> Iterator[tuple[tuple[str, ...], Question]]:
    nodes = question.cluster.num_nodes
    if not question.cluster.inter_node.bytes_per_second:
        return
    for count in (2 * nodes, 4 * nodes, 8 * nodes, 16 * nodes, 64 * nodes):
        cluster = question.cluster.with_nodes(count)
        wider = max(1, count * cluster.gpus_per_node // (64 * question.global_batch_size))
        batch = question.global_batch_size * wider
        words = (f"cluster.num_nodes={count}", *([f"data.global_batch_size={batch}"] if wider > 1 else []))
        yield words, replace(question, cluster=cluster, global_batch_size=batch, world_size=0)


def _shorter(question: Question) -> Iterator[tuple[tuple[str, ...], Question]]:
    length = question.shape.sequence_length // 2
    while length >= 256:
        yield (f"model.sequence_length={length}",), replace(question, shape=replace(question.shape, sequence_length=length))
        length //= 2


def _lighter(question: Question) -> Iterator[tuple[tuple[str, ...], Question]]:
    if question.numerics.state_bytes > NUMERICS["pure_16"].state_bytes:
        yield ("precision=bf16_true",), replace(question, numerics=NUMERICS["pure_16"])


def strategy_overrides(found: Forecast, fixed: Mapping[str, Any] | None = None) -> tuple[str, ...]:
    """What makes `hybrid train` run exactly this layout, after what the user has `fixed`."""
    layout, counted = found.scenario.layout, (fixed or {}).get("num_microbatches")
    pieces = f"num_microbatches={counted}" if counted else f"micro_batch_size={found.scenario.micro_batch_size}"
    words = [
        f"strategy.tensor_parallel_size={layout.tensor_parallel_size}",
        f"strategy.pipeline_parallel_size={layout.pipeline_parallel_size}",
        f"strategy.sharding={layout.sharding}",
        f"strategy.{pieces}",
        f"strategy.activation_checkpoint={layout.activation_checkpoint}",
    ]
    if layout.context_parallel_size > 1:
        words.append(f"strategy.context_parallel_size={layout.context_parallel_size}")
    if layout.sequence_parallel:
        words.append("strategy.sequence_parallel=true")
    if layout.compile:
        words.append("strategy.compile=true")
    if layout.pipeline_parallel_size > 1:
        words += [f"strategy.schedule={layout.schedule}", f"strategy.stages_per_rank={layout.stages_per_rank}"]
    if layout.data_parallel_replicate_size > 1:
        words.append(f"strategy.data_parallel_replicate_size={layout.data_parallel_replicate_size}")
    return tuple(words)
