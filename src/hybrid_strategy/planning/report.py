"""What `hybrid plan` shows, as plain data: rows of tables, lines of text, overrides to paste. Printing is left to others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from hybrid_strategy.planning.decision import decision_table
from hybrid_strategy.planning.forecast import Forecast, forecast
from hybrid_strategy.planning.ladder import LadderStep, ladder
from hybrid_strategy.planning.numerics import NUMERICS
from hybrid_strategy.planning.placement import Placement
from hybrid_strategy.planning.reasons import losers, reliefs, strategy_overrides
from hybrid_strategy.planning.roofline import peak_flops
from hybrid_strategy.planning.search import Question, SearchResult
from hybrid_strategy.spec.bill import CommunicationBill
from hybrid_strategy.spec.ledger import LEDGER_CATEGORIES, MemoryLedger
from hybrid_strategy.units import GIB, format_bytes, format_count, format_seconds

Table = list[dict[str, str]]

STEP_PARTS = (
    ("compute", ("compute_seconds",)),
    ("recompute", ("recompute_seconds",)),
    ("launches", ("launch_seconds",)),
    ("tensor", ("tensor_parallel_seconds", "context_parallel_seconds")),
    ("pipeline", ("pipeline_send_seconds",)),
    ("bubble", ("bubble_seconds",)),
    ("data", ("data_parallel_seconds",)),
    ("optimizer", ("optimizer_seconds", "overhead_seconds")),
)
"""Columns of the step and the parts that each of them sums."""


@dataclass(frozen=True)
class PlanReport:
    """All that is shown of a search.

    Attributes:
        title: model, machines, batch.
        layouts: the best layouts, a row each, the winner first; before them, as `run`, what is configured.
        steps: what the step of each of them is spent on.
        memories: what the memory of each of them holds.
        losers: `change`, `reason`.
        memory, bill: the winner's, a row a line.
        decisions: `question`, `numbers`, `answer`.
        placement: a row a node, a cell a GPU.
        ladder: `step`, `command`, `compare`, `expected`.
        overrides: what makes `hybrid train` run the winner.
        job: nodes and processes on each, for sbatch.
        notes: whether the machine was measured, what weighs most.
        values: everything again as numbers, for `--json`.
    """

    title: str
    layouts: Table
    steps: Table
    memories: Table
    losers: Table
    memory: Table
    bill: Table
    decisions: Table
    placement: list[list[str]]
    ladder: Table
    overrides: tuple[str, ...]
    job: Mapping[str, int]
    notes: tuple[str, ...]
    values: Mapping[str, Any]


@dataclass(frozen=True)
class ReportOptions:
    """What a report holds.

    Attributes:
        configured: the forecast of the layout as configured, where that can be run.
        count: rows of layouts.
        shown: the layout whose memory and messages are explained, by its row; 0: the configured one.
        max_nodes: rows of the placement.
        command: what the commands of the ladder begin with.
    """

    configured: Forecast | None = None
    count: int = 8
    shown: int = 1
    max_nodes: int = 4
    command: str = "hybrid train"


def plan_report(result: SearchResult, options: ReportOptions | None = None) -> PlanReport:
    """The report of a search that found something.

    Raises:
        NoLayoutFitsError: nothing fits; `relief_rows` has the cheapest changes.
    """
    asked = options or ReportOptions()
    question, winner, rows = result.question, result.winner, _rows(result, asked)
    layout, cluster = winner.scenario.layout, question.cluster
    shown = result.forecasts[asked.shown - 1] if asked.shown else asked.configured or winner
    lost = [{"change": each.change, "reason": each.reason} for each in losers(result)]
    rules = [asdict(rule) for rule in decision_table(question, winner)]
    return PlanReport(
        title=title(question, result),
        layouts=[layout_row(number, each) for number, each in rows],
        steps=[step_row(number, each) for number, each in rows],
        memories=[memory_row(number, each) for number, each in rows],
        losers=lost,
        memory=memory_rows(shown.ledger),
        bill=bill_rows(shown.bill),
        decisions=rules,
        placement=Placement(layout, cluster).grid(asked.max_nodes),
        ladder=[_ladder_row(each, asked.command) for each in ladder(question, winner)],
        overrides=strategy_overrides(winner, question.fixed),
        job={
            "nodes": -(-layout.world_size // cluster.gpus_per_node),
            "ntasks_per_node": min(layout.world_size, cluster.gpus_per_node),
        },
        notes=notes(winner),
        values={
            "winner": winner.to_dict(),
            "configured": asked.configured.to_dict() if asked.configured else None,
            "best": [each.to_dict() for each in result.forecasts[: asked.count]],
            "losers": lost,
            "decisions": rules,
            "overrides": list(strategy_overrides(winner, question.fixed)),
            "examined": result.examined,
        },
    )


def _rows(result: SearchResult, asked: ReportOptions) -> list[tuple[str, Forecast]]:
    """What is configured, then the best; where the best is what is configured it is said once."""
    best = [(str(number), each) for number, each in enumerate(result.forecasts[: asked.count], start=1)]
    given = asked.configured
    if given is None or (given.scenario.layout, given.scenario.batch) == (
        result.winner.scenario.layout,
        result.winner.scenario.batch,
    ):
        return best
    return [("run", given), *best]


def _ladder_row(step: LadderStep, command: str) -> dict[str, str]:
    found = step.forecast
    return {
        "step": step.name,
        "command": " ".join((command, *step.overrides)),
        "compare": step.compare,
        "expected": f"{format_seconds(found.step_seconds)}, {format_bytes(found.ledger.total_bytes)}",
    }


def title(question: Question, result: SearchResult) -> str:
    """Model, machines, batch and how much was looked at."""
    shape, cluster = question.shape, question.cluster
    tokens = question.global_batch_size * shape.sequence_length
    return (
        f"{format_count(shape.num_parameters)} {shape.family}, sequence {shape.sequence_length}, "
        f"global batch {question.global_batch_size} ({format_count(tokens)} tokens), {question.processes} x {cluster.gpu} "
        f"({cluster.num_nodes} x {cluster.gpus_per_node}); {result.examined} layouts examined"
    )


def layout_row(number: str, found: Forecast) -> dict[str, str]:
    """One layout in the words of its sizes, what it needs and what it reaches."""
    layout = found.scenario.layout
    replicas, context = layout.data_parallel_replicate_size, layout.context_parallel_size
    return {
        "#": number,
        "dp": str(layout.data_parallel_size),
        "tp": f"{layout.tensor_parallel_size} cp{context}" if context > 1 else str(layout.tensor_parallel_size),
        "pp": str(layout.pipeline_parallel_size),
        "sharding": f"{layout.sharding} x{replicas}" if replicas > 1 else layout.sharding,
        "schedule": f"{layout.schedule} v{layout.stages_per_rank}" if layout.pipeline_parallel_size > 1 else "-",
        "mbs": str(found.scenario.micro_batch_size),
        "m": str(found.scenario.batch.num_microbatches),
        "recompute": layout.activation_checkpoint,
        "GiB/GPU": f"{found.ledger.total_bytes / GIB:.1f}" + ("" if found.fits else " !"),
        "step": format_seconds(found.step_seconds),
        "tokens/s/GPU": f"{found.tokens_per_second_per_gpu:,.0f}",
        "MFU": f"{found.mfu:.1%}",
        "HFU": f"{found.hfu:.1%}",
    }


def step_row(number: str, found: Forecast) -> dict[str, str]:
    """What a step is spent on, in percent."""
    row = {"#": number, "step": format_seconds(found.step_seconds)}
    for name, parts in STEP_PARTS:
        share = sum(getattr(found.step, part) for part in parts) / found.step_seconds
        row[name] = f"{share:.1%}" if share >= 0.0005 else "-"
    return row


def memory_row(number: str, found: Forecast) -> dict[str, str]:
    """What the memory holds, in GiB."""
    kinds = found.ledger.by_category
    row = {"#": number, "GiB": f"{found.ledger.total_bytes / GIB:.1f}"}
    return row | {kind: f"{kinds[kind] / GIB:.1f}" if kind in kinds else "-" for kind in LEDGER_CATEGORIES}


def memory_rows(ledger: MemoryLedger) -> Table:
    """The lines of a ledger and their sum, for `plan --explain memory`."""
    rows = [
        {
            "line": line.name,
            "kind": line.category,
            "size": format_bytes(line.bytes),
            "formula": line.formula,
            "source": line.source,
        }
        for line in ledger.lines
        if line.bytes
    ]
    total, memory = format_bytes(ledger.total_bytes), format_bytes(ledger.memory_bytes)
    return [
        *rows,
        {"line": "total", "kind": "", "size": total, "formula": f"of {memory}", "source": f"rank {ledger.pipeline_rank}"},
    ]


def bill_rows(bill: CommunicationBill) -> Table:
    """The lines of a bill and their sum, for `plan --explain communication`."""
    rows = [
        {
            "axis": line.axis,
            "what": f"{line.collective} of {line.what}",
            "group": f"{line.group_size}, {line.level}",
            "calls": f"{line.calls:,.0f}",
            "sent": format_bytes(line.sent_bytes),
            "time": format_seconds(line.seconds),
            "exposed": format_seconds(line.exposed_seconds),
            "formula": line.formula,
            "source": line.source,
        }
        for line in bill.lines
    ]
    total = {"axis": "total", "what": "", "group": "", "calls": "", "sent": format_bytes(bill.sent_bytes)}
    times = {"time": format_seconds(bill.seconds), "exposed": format_seconds(bill.exposed_seconds)}
    return [*rows, total | times | {"formula": "", "source": ""}] if rows else []


def notes(winner: Forecast) -> tuple[str, ...]:
    """What weighs most, how far to trust it, and what a wide precision costs."""
    ledger, cluster = winner.ledger, winner.scenario.cluster
    kind, size = max(ledger.by_category.items(), key=lambda each: each[1])
    share = size / ledger.total_bytes
    trust = "measured on this machine" if cluster.measured else cluster.source or "nothing is known of it"
    told = [f"most memory: {kind}, {format_bytes(size)} ({share:.0%})", f"cluster {cluster.name}: {trust}"]
    if peak_flops(winner.scenario) < cluster.peak_flops:
        quicker = forecast(replace(winner.scenario, numerics=NUMERICS["autocast"]))
        shown = f"{format_seconds(winner.step_seconds)} a step, with precision=bf16_mixed {format_seconds(quicker.step_seconds)}"
        told.insert(0, f"products are computed in 32 bit: {shown}")
    return tuple(told)


def relief_rows(question: Question) -> Table:
    """The cheapest changes after which something fits, each as overrides to paste."""
    return [
        {
            "overrides": " ".join(each.overrides),
            "layout": each.forecast.scenario.layout.name,
            "GiB/GPU": f"{each.forecast.ledger.total_bytes / GIB:.1f}",
            "step": format_seconds(each.forecast.step_seconds),
        }
        for each in reliefs(question)
    ]
