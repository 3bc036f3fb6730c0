"""Schedules as text, as docs/schedules.md shows them: a line a rank, three characters a unit of time."""

from __future__ import annotations

from hybrid_strategy import registry
from hybrid_strategy.planning.simulate import simulate
from hybrid_strategy.spec.table import Cell

WIDTH = 3


def draw(schedule: str, ranks: int, stages_per_rank: int, micro_batches: int) -> str:
    """The table under unit costs (F 1, B 2, I 1, W 1); `F3'` is micro-batch 3 at the rank's second stage, a dot is idle."""
    table = registry.find("schedules", schedule, "schedule").build(ranks, stages_per_rank, micro_batches)
    played = simulate(table)
    lines = []
    for rank, cells in enumerate(table.ranks):
        stages = sorted({cell.stage for cell in cells})
        line = [" . "] * round(played.makespan_seconds)
        for cell in cells:
            start, end = (round(each) for each in played.span(cell))
            line[start:end] = _drawn(cell, stages.index(cell.stage), end - start)
        lines.append(f"{rank} |{''.join(line)}|")
    return "\n".join(each.rstrip() for each in lines)


def _drawn(cell: Cell, place: int, units: int) -> list[str]:
    mark = f"{cell.kind}{cell.micro_batch}" + "'" * place
    filled = mark.ljust(WIDTH * units - 1, "-") + " " if units > 1 else mark.ljust(WIDTH)
    return [filled[start : start + WIDTH] for start in range(0, WIDTH * units, WIDTH)]
