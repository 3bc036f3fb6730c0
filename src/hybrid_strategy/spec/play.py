"""What a schedule table means: which cell waits for which, and what happens when all ranks play at once.

Each rank plays its cells strictly in order. Before a cell it waits until what the cell needs has arrived; sending costs the
sender nothing. The engine that moves tensors and the planner that forecasts times both follow this one rule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeAlias

from hybrid_strategy.errors import LayoutError, message
from hybrid_strategy.spec.table import BACKWARD, FORWARD, INPUT, WEIGHT, Cell, ScheduleTable

ACTIVATION, GRADIENT = "activation", "gradient"

Product = tuple[str, int, int]
"""What a cell makes: `(ACTIVATION or GRADIENT, stage, micro-batch)`; the gradient is that of the stage's input."""

UNIT_SECONDS = {FORWARD: 1.0, BACKWARD: 2.0, INPUT: 1.0, WEIGHT: 1.0}
"""Pass times under which bubbles are stated: a backward pass costs two forward passes, one for each half of it."""


def makes(cell: Cell) -> Product | None:
    """What other cells may wait for; a weight pass makes nothing that a cell needs."""
    if cell.kind == WEIGHT:
        return None
    return (ACTIVATION if cell.kind == FORWARD else GRADIENT, cell.stage, cell.micro_batch)


def needs(cell: Cell, num_stages: int) -> tuple[Product, ...]:
    """What must be there before `cell` can start, the remote input last.

    >>> needs(Cell(1, "F", 0), 4), needs(Cell(3, "B", 0), 4)
    ((('activation', 0, 0),), (('activation', 3, 0),))
    >>> needs(Cell(2, "I", 5), 4), needs(Cell(2, "W", 5), 4)
    ((('activation', 2, 5), ('gradient', 3, 5)), (('gradient', 2, 5),))
    """
    stage, batch = cell.stage, cell.micro_batch
    if cell.kind == FORWARD:
        return ((ACTIVATION, stage - 1, batch),) if stage > 0 else ()
    if cell.kind == WEIGHT:
        return ((GRADIENT, stage, batch),)
    own: tuple[Product, ...] = ((ACTIVATION, stage, batch),)
    return own if stage == num_stages - 1 else (*own, (GRADIENT, stage + 1, batch))


@dataclass(frozen=True)
class Timeline:
    """When each cell ran: `starts[r][i]` and `ends[r][i]` are seconds from the start of the step, for cell `i` of rank `r`."""

    starts: tuple[tuple[float, ...], ...]
    ends: tuple[tuple[float, ...], ...]

    @property
    def makespan_seconds(self) -> float:
        return max((ends[-1] for ends in self.ends if ends), default=0.0)

    @property
    def idle_fractions(self) -> tuple[float, ...]:
        """Per rank, the share of the step in which it plays no cell."""
        whole = self.makespan_seconds
        busy = [sum(ends) - sum(starts) for starts, ends in zip(self.starts, self.ends, strict=True)]
        return tuple(1.0 - seconds / whole if whole else 0.0 for seconds in busy)

    @property
    def bubble_fraction(self) -> float:
        """The idle share of the step over all ranks."""
        return sum(self.idle_fractions) / len(self.ends)


def play(
    table: ScheduleTable,
    cell_seconds: Callable[[Cell], float],
    send_seconds: Callable[[int, int], float] = lambda source, target: 0.0,
) -> Timeline:
    """Play `table` on a clock.

    Args:
        table: what to play.
        cell_seconds: time of one cell.
        send_seconds: time of a message from one pipeline rank to another; messages do not wait for each other.

    Raises:
        LayoutError: the ranks wait for each other for ever.
    """
    made: dict[Product, tuple[float, int]] = {}
    waiting: dict[Product, list[int]] = {}
    starts: list[list[float]] = [[] for _ in table.ranks]
    ends: list[list[float]] = [[] for _ in table.ranks]
    ready = list(range(len(table.ranks)))
    while ready:
        rank = ready.pop()
        for cell in table.ranks[rank][len(ends[rank]) :]:
            inputs = needs(cell, table.num_stages)
            missing = next((product for product in inputs if product not in made), None)
            if missing is not None:
                waiting.setdefault(missing, []).append(rank)
                break
            start = ends[rank][-1] if ends[rank] else 0.0
            for end, source in (made[product] for product in inputs):
                start = max(start, end + (send_seconds(source, rank) if source != rank else 0.0))
            end = start + cell_seconds(cell)
            starts[rank].append(start)
            ends[rank].append(end)
            product = makes(cell)
            if product is not None:
                made[product] = (end, rank)
                ready.extend(waiting.pop(product, ()))
    _check_all_played(table, [len(each) for each in ends])
    return Timeline(tuple(map(tuple, starts)), tuple(map(tuple, ends)))


def _check_all_played(table: ScheduleTable, played: list[int]) -> None:
    """Name the first cell that never ran: the one of the fewest cells before it, then of the lowest rank."""
    stuck = [(count, rank) for rank, count in enumerate(played) if count < len(table.ranks[rank])]
    if not stuck:
        return
    count, rank = min(stuck)
    waits = ", ".join(f"rank {each} at {table.ranks[each][number]}" for number, each in sorted(stuck))
    rule = f"cell {table.ranks[rank][count]} of rank {rank} can never run, its input is made by none or only after it"
    raise LayoutError(message("schedule", table.schedule, rule, f"Waiting for ever: {waits}", "Set another order"))


def unit_bubble_fraction(table: ScheduleTable) -> float:
    """The bubble of `table` under `UNIT_SECONDS`, by playing it."""
    return play(table, lambda cell: UNIT_SECONDS[cell.kind]).bubble_fraction


def peak_in_flight(cells: Iterable[Cell]) -> int:
    """Most forward activations held at once by a rank that plays `cells` in order.

    An activation is held from its forward pass until its backward pass, and where that is split until its weight pass,
    which still needs the layer's inputs.

    >>> peak_in_flight([Cell(0, "F", 0), Cell(0, "F", 1), Cell(0, "B", 0), Cell(0, "B", 1)])
    2
    """
    held = peak = 0
    for cell in cells:
        if cell.kind == FORWARD:
            held += 1
            peak = max(peak, held)
        elif cell.kind in (BACKWARD, WEIGHT):
            held -= 1
    return peak


Held: TypeAlias = tuple[int, int, int, int]
"""What a rank holds at once: passes before their backward pass, passes between the halves of a split one, how many of these are
of the last stage, and what is under way: 1 a backward pass, 2 that of the last stage, which has the loss, 0 neither."""


def held_halves(cells: Iterable[Cell], num_stages: int) -> list[Held]:
    """What a rank holds while it plays `cells`; only what nothing else exceeds.

    On the first stage a split backward pass is all in its second half, because nobody waits for gradients of its inputs.

    >>> held_halves([Cell(1, "F", 0), Cell(1, "F", 1), Cell(1, "I", 0), Cell(1, "W", 0), Cell(1, "I", 1)], 2)
    [(1, 1, 1, 0), (2, 0, 0, 0), (2, 0, 0, 2)]
    """
    forward = work = last = 0
    seen = set()
    for cell in cells:
        ends = cell.stage == num_stages - 1
        whole = cell.kind == BACKWARD or (cell.kind == WEIGHT and cell.stage == 0)
        if whole or (cell.kind == INPUT and cell.stage > 0):
            seen.add((forward, work, last, 2 if ends else 1))
        if cell.kind == FORWARD:
            forward += 1
        elif cell.kind == WEIGHT and cell.stage > 0:
            work, last = work - 1, last - ends
        elif cell.kind != INPUT or cell.stage > 0:
            forward -= 1
            work, last = work + (cell.kind == INPUT), last + (ends and cell.kind == INPUT)
        seen.add((forward, work, last, 0))
    found: list[Held] = []
    for each in sorted(seen, reverse=True):  # those before it have as much of the first
        if not any(other[1] >= each[1] and other[2] >= each[2] and other[3] == each[3] for other in found):
            found.append(each)
    return found[::-1]
