"""Which messages a schedule table needs: for each cell of a rank, what it waits for and where its result goes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from hybrid_strategy.spec.table import BACKWARD, FORWARD, INPUT, WEIGHT, Cell, ScheduleTable


@dataclass(frozen=True)
class Route:
    """One message between pipeline ranks; `tag` numbers it within the step."""

    source: int
    destination: int
    tag: int
    cell: Cell
    """The cell whose result it carries."""


@dataclass(frozen=True)
class RankRoutes:
    """The messages of one rank: `waits[cell]`, `sends[cell]`, and per source the order in which that source sends."""

    waits: dict[Cell, Route]
    sends: dict[Cell, Route]
    arrivals: dict[int, tuple[Route, ...]]


def _route(table: ScheduleTable, cell: Cell) -> Route | None:
    """Where the result of `cell` goes, or `None` when it stays on its rank or goes nowhere."""
    if cell.kind == WEIGHT:
        return None
    target = cell.stage + 1 if cell.kind == FORWARD else cell.stage - 1
    if not 0 <= target < table.num_stages:
        return None
    source, destination = table.stage_ranks[cell.stage], table.stage_ranks[target]
    if source == destination:
        return None
    tag = (cell.stage * 2 + (cell.kind != FORWARD)) * table.num_microbatches + cell.micro_batch
    return Route(source, destination, tag, cell)


def _consumer(table: ScheduleTable, route: Route) -> Cell:
    """The cell that waits for a message."""
    cell = route.cell
    if cell.kind == FORWARD:
        return Cell(cell.stage + 1, FORWARD, cell.micro_batch)
    stage = cell.stage - 1
    kinds = {each.kind for each in table.ranks[table.stage_ranks[stage]] if each.stage == stage}
    split = INPUT in kinds and Cell(stage, INPUT, cell.micro_batch) in table.ranks[table.stage_ranks[stage]]
    return Cell(stage, INPUT if split else BACKWARD, cell.micro_batch)


@lru_cache(maxsize=64)
def rank_routes(table: ScheduleTable, rank: int) -> RankRoutes:
    """All messages that pipeline rank `rank` sends and receives when it plays `table`."""
    waits: dict[Cell, Route] = {}
    sends: dict[Cell, Route] = {}
    arrivals: dict[int, list[Route]] = {}
    for source, cells in enumerate(table.ranks):
        for cell in cells:
            route = _route(table, cell)
            if route is None:
                continue
            if source == rank:
                sends[cell] = route
            elif route.destination == rank:
                waits[_consumer(table, route)] = route
                arrivals.setdefault(source, []).append(route)
    return RankRoutes(waits, sends, {source: tuple(routes) for source, routes in arrivals.items()})
