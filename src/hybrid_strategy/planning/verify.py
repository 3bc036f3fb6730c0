"""Is a schedule table right? Every pass once, on its stage's rank, and no rank waiting for ever."""

from __future__ import annotations

from collections.abc import Iterator

from hybrid_strategy.errors import LayoutError, message
from hybrid_strategy.spec.play import UNIT_SECONDS, play
from hybrid_strategy.spec.table import BACKWARD, FORWARD, INPUT, WEIGHT, Cell, ScheduleTable


def verify_table(table: ScheduleTable, forward_only: bool = False) -> None:
    """Raise at the first cell of `table` that is wrong, missing or can never run.

    Args:
        table: any table, one made by a schedule or one read from a file.
        forward_only: no backward passes are expected (validation, test, predict).

    Raises:
        LayoutError: with the cell, its rank and its place in the rank's order.
    """
    _check_placement(table)
    seen: set[Cell] = set()
    for rank, cells in enumerate(table.ranks):
        for place, cell in enumerate(cells):
            reason = _wrong(cell, rank, table, seen)
            if reason:
                raise _error(table, f"cell {cell}, number {place} of rank {rank}, {reason}")
            seen.add(cell)
    for reason in _missing(table, seen, forward_only):
        raise _error(table, reason)
    play(table, lambda cell: UNIT_SECONDS[cell.kind])


def _check_placement(table: ScheduleTable) -> None:
    if len(table.stage_ranks) != table.num_stages:
        raise _error(table, f"{len(table.stage_ranks)} stages are placed, not {table.num_stages}")
    for stage, rank in enumerate(table.stage_ranks):
        if not 0 <= rank < len(table.ranks):
            raise _error(table, f"stage {stage} is placed on rank {rank}, but the ranks are 0 to {len(table.ranks) - 1}")


def _wrong(cell: Cell, rank: int, table: ScheduleTable, seen: set[Cell]) -> str | None:
    """What is wrong with a cell, given those before it on its own rank (where all cells of its stage must be)."""
    kind, stage, batch = cell.kind, cell.stage, cell.micro_batch
    if kind not in (FORWARD, BACKWARD, INPUT, WEIGHT):
        return "has a pass that is none of F, B, I and W"
    if not 0 <= stage < table.num_stages:
        return f"has a stage that is not there: the stages are 0 to {table.num_stages - 1}"
    if not 0 <= batch < table.num_microbatches:
        return f"has a micro-batch that is not there: the micro-batches are 0 to {table.num_microbatches - 1}"
    if table.stage_ranks[stage] != rank:
        return f"stands on the wrong rank: stage {stage} is on rank {table.stage_ranks[stage]}"
    if cell in seen:
        return "comes twice"
    if kind == BACKWARD and seen & {Cell(stage, INPUT, batch), Cell(stage, WEIGHT, batch)}:
        return "repeats a backward pass that was split into I and W"
    if kind in (INPUT, WEIGHT) and Cell(stage, BACKWARD, batch) in seen:
        return "repeats a backward pass that was done whole by B"
    if kind != FORWARD and Cell(stage, FORWARD, batch) not in seen:
        return "comes before its own forward pass"
    if kind == WEIGHT and Cell(stage, INPUT, batch) not in seen:
        return "comes before its own input pass"
    return None


def _missing(table: ScheduleTable, seen: set[Cell], forward_only: bool) -> Iterator[str]:
    """What is not in the table though it should be, or the other way round, in order of stage and micro-batch."""
    for stage in range(table.num_stages):
        for batch in range(table.num_microbatches):
            done = "".join(kind for kind in (FORWARD, BACKWARD, INPUT, WEIGHT) if Cell(stage, kind, batch) in seen)
            if forward_only and done != FORWARD:
                yield f"stage {stage} does {done or 'nothing'} over micro-batch {batch}, not F alone"
            elif not forward_only and done not in (FORWARD + BACKWARD, FORWARD + INPUT + WEIGHT):
                yield f"stage {stage} does {done or 'nothing'} over micro-batch {batch}, not F and B, or F, I and W"


def _error(table: ScheduleTable, reason: str) -> LayoutError:
    numbers = f"The table has {table.num_stages} stages, {table.num_microbatches} micro-batches and {len(table.ranks)} ranks"
    advice = "Give each stage F and B (or F, I and W) once a micro-batch, on the stage's own rank"
    return LayoutError(message("schedule", table.schedule, reason, numbers, advice))
