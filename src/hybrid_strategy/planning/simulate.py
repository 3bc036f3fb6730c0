"""Forecast of a step from measured or estimated pass times: the table the engine plays, played on a clock."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hybrid_strategy.spec.play import UNIT_SECONDS, Timeline, peak_in_flight, play
from hybrid_strategy.spec.table import BACKWARD, INPUT, WEIGHT, Cell, ScheduleTable


@dataclass(frozen=True)
class PassCosts:
    """Seconds of passes and messages.

    Attributes:
        stages: per stage, pass kind (`F B I W`) -> seconds. A stage that is not listed, or a kind missing where neither it
            nor its halves are given, takes the unit times (F 1, B 2, I 1, W 1). `I` and `W` default to half of `B` each,
            `B` to `I` and `W` together.
        send_seconds: (from rank, to rank) -> seconds of one message; the default of every pair is `default_send_seconds`.
        default_send_seconds: seconds of a message between any two ranks not listed.
    """

    stages: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    send_seconds: Mapping[tuple[int, int], float] = field(default_factory=dict)
    default_send_seconds: float = 0.0

    def cell_seconds(self, cell: Cell) -> float:
        """Seconds of one cell.

        >>> costs = PassCosts({0: {"F": 3.0, "B": 8.0}})
        >>> costs.cell_seconds(Cell(0, "B", 0)), costs.cell_seconds(Cell(0, "I", 0)), costs.cell_seconds(Cell(1, "B", 0))
        (8.0, 4.0, 2.0)
        """
        times = self.stages.get(cell.stage, UNIT_SECONDS)
        if cell.kind in times:
            return times[cell.kind]
        if cell.kind == BACKWARD and INPUT in times and WEIGHT in times:
            return times[INPUT] + times[WEIGHT]
        if cell.kind in (INPUT, WEIGHT) and BACKWARD in times:
            return times[BACKWARD] / 2
        return UNIT_SECONDS[cell.kind]

    def message_seconds(self, source: int, target: int) -> float:
        """Seconds of one message from pipeline rank `source` to `target`."""
        return self.send_seconds.get((source, target), self.default_send_seconds)


@dataclass(frozen=True)
class Simulation:
    """A table, when each cell runs, and how much each rank holds."""

    table: ScheduleTable
    timeline: Timeline

    @property
    def makespan_seconds(self) -> float:
        return self.timeline.makespan_seconds

    @property
    def idle_fractions(self) -> tuple[float, ...]:
        """Idle share of the step, per rank."""
        return self.timeline.idle_fractions

    @property
    def bubble_fraction(self) -> float:
        """Idle share of the step over all ranks."""
        return self.timeline.bubble_fraction

    @property
    def peak_in_flight(self) -> tuple[int, ...]:
        """Most forward activations (stage x micro-batch) held at once, per rank."""
        return tuple(peak_in_flight(cells) for cells in self.table.ranks)

    def span(self, cell: Cell) -> tuple[float, float]:
        """Start and end of a cell, in seconds from the start of the step."""
        rank = self.table.stage_ranks[cell.stage]
        place = self.table.ranks[rank].index(cell)
        return self.timeline.starts[rank][place], self.timeline.ends[rank][place]


def simulate(table: ScheduleTable, costs: PassCosts | None = None) -> Simulation:
    """Play `table` with the given times; without them under unit times.

    >>> from hybrid_strategy import registry
    >>> table = registry.find("schedules", "1F1B", "schedule").build(2, 1, 3)
    >>> simulate(table).bubble_fraction, simulate(table).peak_in_flight, simulate(table).span(Cell(0, "B", 0))
    (0.25, (2, 1), (4.0, 6.0))

    Raises:
        LayoutError: the ranks wait for each other for ever.
    """
    times = costs or PassCosts()
    return Simulation(table, play(table, times.cell_seconds, times.message_seconds))
