"""The plan as a table: what will run where."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console, Group
from rich.table import Table

from hybrid_strategy.planning.build_plan import rank_map
from hybrid_strategy.spec.layout import Layout
from hybrid_strategy.spec.plan import Plan
from hybrid_strategy.units import format_count

_MAX_RANKS = 16
_AXES = (
    ("pipeline_parallel", "pipeline", "pipeline_parallel_size"),
    ("data_parallel", "data", "data_parallel_size"),
    ("context_parallel", "context", "context_parallel_size"),
    ("tensor_parallel", "tensor", "tensor_parallel_size"),
)
_NUMBERED = re.compile(r"^(.*\.)(\d+)$")


def print_plan(plan: Plan, facts: Mapping[str, str], console: Console) -> None:
    """Prints layout, batch, schedule and the rank map; `facts` are further lines, e.g. where it runs and the precision."""
    console.print(Group(_facts(plan, facts), _ranks(plan)))


def _facts(plan: Plan, facts: Mapping[str, str]) -> Table:
    table = Table(box=box.SIMPLE, show_header=False, pad_edge=False, title=f"plan {plan.layout.name}", title_justify="left")
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for name, text in (_rows(plan) | dict(facts)).items():
        table.add_row(name, text)
    return table


def _rows(plan: Plan) -> dict[str, str]:
    layout = plan.layout
    rows = {"layout": f"{_product(layout)} = {_count(layout.world_size, 'process', 'processes')}", "sharding": _sharding(layout)}
    if plan.batch.global_batch_size:
        rows["batch"] = _batch(plan)
    elif layout.pipeline_parallel_size > 1:
        rows["batch"] = f"cut into {_count(plan.batch.num_microbatches, 'micro-batch', 'micro-batches')}"
    rows["schedule"] = _schedule(plan)
    if plan.num_parameters:
        rows["parameters"] = f"{format_count(plan.num_parameters)} ({plan.num_parameters:,})"
    if plan.learning_rate is not None:
        rows["learning rate"] = str(plan.extra.get("learning_rate", f"{plan.learning_rate:g} at its peak"))
    rows.update({f"reason {index}": reason for index, reason in enumerate(plan.reasons, start=1)})
    return rows


def _product(layout: Layout) -> str:
    sizes = {word: getattr(layout, size) for _, word, size in _AXES}
    return " x ".join(f"{word} {size}" for word, size in sizes.items() if word != "context" or size > 1)


def _sharding(layout: Layout) -> str:
    words = [layout.sharding]
    if layout.sharding != "ddp" and layout.data_parallel_replicate_size > 1:
        words.append(f"{layout.data_parallel_replicate_size} replicas of {layout.shard_size} ranks")
    if layout.sequence_parallel:
        words.append("sequence parallel")
    if layout.activation_checkpoint != "none":
        words.append(f"activation checkpoint {layout.activation_checkpoint}")
    if layout.compile:
        words.append("layers compiled")
    return ", ".join(words)


def _batch(plan: Plan) -> str:
    batch, data = plan.batch, plan.layout.data_parallel_size
    parts = [_count(data, "data-parallel rank"), _count(batch.num_microbatches, "micro-batch", "micro-batches")]
    if batch.accumulate_grad_batches > 1:
        parts.insert(1, f"{batch.accumulate_grad_batches} accumulated")
    return f"{batch.global_batch_size} samples a step = {' x '.join(parts)} of {batch.micro_batch_size(data)}"


def _schedule(plan: Plan) -> str:
    layout = plan.layout
    if layout.pipeline_parallel_size == 1:
        return "one stage, no bubble"
    stages = f"{_count(layout.num_stages, 'stage')}, {layout.stages_per_rank} a rank"
    return f"{layout.schedule}, {stages}, bubble {plan.bubble_fraction:.1%}"


def _ranks(plan: Plan) -> Table:
    axes = [(key, word) for key, word, size in _AXES if getattr(plan.layout, size) > 1]
    table = Table(box=box.SIMPLE, pad_edge=False)
    table.add_column("rank", justify="right")
    for _, word in axes:
        table.add_column(word, justify="right")
    table.add_column("stages")
    if plan.stage_units:
        table.add_column("units", overflow="fold")
        table.add_column("parameters", justify="right")
    rows = rank_map(plan.layout, plan.rank_parameters)
    for row in rows[:_MAX_RANKS]:
        table.add_row(*_cells(plan, row, [key for key, _ in axes]))
    if len(rows) > _MAX_RANKS:
        table.add_row("...", *[""] * (len(axes) - 1 if axes else 0), f"and {len(rows) - _MAX_RANKS} more")
    return table


def _cells(plan: Plan, row: Mapping[str, Any], axes: Sequence[str]) -> list[str]:
    cells = [str(row["rank"]), *(str(row[axis]) for axis in axes), str(row["stages"])]
    if plan.stage_units:
        stages = [int(stage) for stage in str(row["stages"]).split(", ") if stage]
        cells.append(" | ".join(shorten(plan.stage_units[stage]) for stage in stages))
        cells.append(format_count(int(row["parameters"])))
    return cells


def shorten(units: Sequence[str]) -> str:
    """Names of units with runs of numbers drawn together.

    >>> shorten(("embed_tokens", "layers.0", "layers.1", "layers.2", "norm"))
    'embed_tokens, layers.0-2, norm'
    """
    words: list[tuple[str, int, int]] = []
    for unit in units:
        found = _NUMBERED.match(unit)
        stem, number = (found[1], int(found[2])) if found else (unit, -1)
        if words and number >= 0 and words[-1][0] == stem and words[-1][2] == number - 1:
            words[-1] = (stem, words[-1][1], number)
        else:
            words.append((stem, number, number))
    return ", ".join(_run(*word) for word in words)


def _run(stem: str, first: int, last: int) -> str:
    if first < 0:
        return stem
    return f"{stem}{first}-{last}" if last > first else f"{stem}{first}"


def _count(number: int, one: str, many: str | None = None) -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"
