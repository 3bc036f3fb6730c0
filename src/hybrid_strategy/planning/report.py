"""What `hybrid plan` shows, as plain data: rows of tables, lines of text, overrides to paste. Printing is left to others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from hybrid_strategy.planning.decision import decision_table
from hybrid_strategy.planning.forecast import Forecast
from hybrid_strategy.planning.ladder import ladder
from hybrid_strategy.planning.placement import Placement
from hybrid_strategy.planning.reasons import losers, reliefs, strategy_overrides
from hybrid_strategy.planning.search import Question, SearchResult
from hybrid_strategy.spec.bill import CommunicationBill
from hybrid_strategy.spec.ledger import MemoryLedger
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
        layouts: the best layouts, a row each, the winner first.
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


def plan_report(result: SearchResult, count: int = 8, max_nodes: int = 4, ladder_command: str = "hybrid train") -> PlanReport:
    """The report of a search that found something.

    Raises:
        NoLayoutFitsError: nothing fits; `relief_rows` has the cheapest changes.
    """
    question, winner, best = result.question, result.winner, result.forecasts[:count]
    lost = losers(result)
    steps = ladder(question, winner)
    layout, cluster = winner.scenario.layout, question.cluster
    rules = decision_table(question, winner)
    return PlanReport(
        title=title(question, result),
        layouts=[layout_row(number, each) for number, each in enumerate(best, start=1)],
        losers=[{"change": each.change, "reason": each.reason} for each in lost],
        memory=memory_rows(winner.ledger),
        bill=bill_rows(winner.bill),
        decisions=[asdict(rule) for rule in rules],
        placement=Placement(layout, cluster).grid(max_nodes),
        ladder=[
            {
                "step": each.name,
                "command": " ".join((ladder_command, *each.overrides)),
                "compare": each.compare,
                "expected": f"{format_seconds(each.forecast.step_seconds)}, {format_bytes(each.forecast.ledger.total_bytes)}",
            }
            for each in steps
        ],
        overrides=strategy_overrides(winner),
        job={
            "nodes": -(-layout.world_size // cluster.gpus_per_node),
            "ntasks_per_node": min(layout.world_size, cluster.gpus_per_node),
        },
        notes=notes(winner),
        values={
            "winner": winner.to_dict(),
            "best": [each.to_dict() for each in best],
            "losers": [{"change": each.change, "reason": each.reason} for each in lost],
            "decisions": [asdict(rule) for rule in rules],
            "overrides": list(strategy_overrides(winner)),
            "examined": result.examined,
        },
    )


def title(question: Question, result: SearchResult) -> str:
    """Model, machines, batch and how much was looked at."""
    shape, cluster = question.shape, question.cluster
    tokens = question.global_batch_size * shape.sequence_length
    return (
        f"{format_count(shape.num_parameters)} {shape.family}, sequence {shape.sequence_length}, "
        f"global batch {question.global_batch_size} ({format_count(tokens)} tokens), {question.processes} x {cluster.gpu} "
        f"({cluster.num_nodes} x {cluster.gpus_per_node}); {result.examined} layouts examined"
    )


def layout_row(number: int, found: Forecast) -> dict[str, str]:
    """One layout in the words of its sizes, its memory, its step and their parts."""
    layout, step = found.scenario.layout, found.step
    row = {
        "#": str(number),
        "dp": str(layout.data_parallel_size),
        "tp": str(layout.tensor_parallel_size),
        "pp": str(layout.pipeline_parallel_size),
        "sharding": layout.sharding,
        "schedule": layout.schedule if layout.pipeline_parallel_size > 1 else "-",
        "stages": str(layout.stages_per_rank),
        "mbs": str(found.scenario.micro_batch_size),
        "m": str(found.scenario.batch.num_microbatches),
        "checkpoint": layout.activation_checkpoint,
        "GiB/GPU": f"{found.ledger.total_bytes / GIB:.1f}",
        "step": format_seconds(found.step_seconds),
    }
    for name, parts in STEP_PARTS:
        share = sum(getattr(step, part) for part in parts) / found.step_seconds
        row[name] = f"{share:.1%}" if share >= 0.0005 else "-"
    return row | {
        "tokens/s/GPU": f"{found.tokens_per_second_per_gpu:,.0f}",
        "MFU": f"{found.mfu:.1%}",
        "HFU": f"{found.hfu:.1%}",
    }


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
    """What weighs most, and how far to trust it."""
    ledger, cluster = winner.ledger, winner.scenario.cluster
    kind, size = max(ledger.by_category.items(), key=lambda each: each[1])
    share = size / ledger.total_bytes
    trust = "measured on this machine" if cluster.measured else "from data sheets and published runs; `hybrid doctor` measures it"
    return (f"most memory: {kind}, {format_bytes(size)} ({share:.0%})", f"cluster {cluster.name}: {trust}")


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
