"""What all schedules share: where stages stand, how a table is put together, what is counted from it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from hybrid_strategy.spec.play import peak_in_flight, unit_bubble_fraction
from hybrid_strategy.spec.schedule import Refusal
from hybrid_strategy.spec.table import BACKWARD, FORWARD, Cell, ScheduleTable

Slot = tuple[int, int]
"""A stage and a micro-batch."""


def loop_placement(pipeline_size: int, stages_per_rank: int) -> tuple[int, ...]:
    """Stages dealt out in rounds.

    >>> loop_placement(3, 2)
    (0, 1, 2, 0, 1, 2)
    """
    return tuple(range(pipeline_size)) * stages_per_rank


def v_placement(pipeline_size: int) -> tuple[int, ...]:
    """Two stages a rank, down the ranks and back: the first and the last stage share rank 0.

    >>> v_placement(3)
    (0, 1, 2, 2, 1, 0)
    """
    down = tuple(range(pipeline_size))
    return down + down[::-1]


def round_up(number: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is not below `number`."""
    return -(-number // multiple) * multiple


def weave(pattern: Iterable[str], streams: dict[str, Iterator[Slot]]) -> Iterator[Cell]:
    """Cells in the order of `pattern`: names of streams, the first letter being the pass; each takes its stream's next slot."""
    for name in pattern:
        stage, micro_batch = next(streams[name])
        yield Cell(stage, name[0], micro_batch)


def one_rank_order(num_stages: int, num_microbatches: int) -> Iterator[Cell]:
    """One process: each micro-batch goes forward through all stages and back at once, so one activation set is held."""
    for micro_batch in range(num_microbatches):
        yield from (Cell(stage, FORWARD, micro_batch) for stage in range(num_stages))
        yield from (Cell(stage, BACKWARD, micro_batch) for stage in reversed(range(num_stages)))


@dataclass(frozen=True)
class ScheduleBase(ABC):
    """A schedule by the order in which one rank plays its cells.

    A schedule whose order is defined for some numbers of micro-batches only says so in `playable_count`. Any other number
    takes the order of the next playable one and leaves out the micro-batches that are not there: micro-batches never wait
    for each other's tensors, so an order without deadlock stays one when a micro-batch is left out, and nothing takes longer.
    """

    name: str = ""
    default_stages_per_rank: int = 1
    uses_weight_pass: bool = False

    @abstractmethod
    def order(self, rank: int, sizes: Sizes) -> Iterable[Cell]:
        """The cells of `rank` in order; two ranks or more, a playable number of micro-batches."""

    def playable_count(self, pipeline_size: int, num_microbatches: int) -> int:
        """The least number of micro-batches, not below the given one, for which `order` is defined."""
        return num_microbatches

    def stage_ranks(self, pipeline_size: int, stages_per_rank: int) -> tuple[int, ...]:
        """The pipeline rank of each stage."""
        return loop_placement(pipeline_size, stages_per_rank)

    def refuse(self, pipeline_size: int, stages_per_rank: int, num_microbatches: int) -> Refusal | None:
        """Why these sizes cannot be played; None when they can."""
        if pipeline_size == 1 or stages_per_rank == 1:
            return None
        rule = f"the schedule {self.name} holds one stage a rank"
        numbers = f"{stages_per_rank} stages on each of {pipeline_size} ranks were asked for"
        return "stages_per_rank", stages_per_rank, rule, numbers, "Set 1, or schedule=Interleaved1F1B"

    def build(self, pipeline_size: int, stages_per_rank: int, num_microbatches: int) -> ScheduleTable:
        """The table, for any number of micro-batches of 1 or more."""
        return _build(self, Sizes(pipeline_size, stages_per_rank, num_microbatches))

    def rank_order(self, rank: int, pipeline_size: int, stages_per_rank: int, num_microbatches: int) -> tuple[Cell, ...]:
        """The row of `rank`, without those of all others."""
        return _rank_cells(self, rank, Sizes(pipeline_size, stages_per_rank, num_microbatches))

    def bubble_fraction(self, pipeline_size: int, stages_per_rank: int, num_microbatches: int) -> float:
        """Idle share of a step with F=1, B=2, I=1, W=1, by playing the table."""
        return _bubble_fraction(self, Sizes(pipeline_size, stages_per_rank, num_microbatches))

    def max_in_flight(self, rank: int, pipeline_size: int, stages_per_rank: int, num_microbatches: int) -> int:
        """Most forward activations (stage x micro-batch) that `rank` holds at once, by walking through its cells."""
        return peak_in_flight(self.rank_order(rank, pipeline_size, stages_per_rank, num_microbatches))


@dataclass(frozen=True)
class Sizes:
    """Pipeline ranks, stages on each, micro-batches."""

    pipeline_size: int
    stages_per_rank: int
    num_microbatches: int

    @property
    def num_stages(self) -> int:
        return self.pipeline_size * self.stages_per_rank


class LoopedSchedule(ScheduleBase):
    """Several stages a rank, dealt out in rounds: stage `s` stands on rank `s % pipeline_size`."""

    def refuse(self, pipeline_size: int, stages_per_rank: int, num_microbatches: int) -> Refusal | None:
        """One stage a rank is what the schedules without a loop are for."""
        if pipeline_size == 1 or stages_per_rank > 1:
            return None
        rule = f"the schedule {self.name} needs two stages or more on each rank"
        numbers = f"{stages_per_rank} stage on each of {pipeline_size} ranks leaves nothing to interleave"
        return "stages_per_rank", stages_per_rank, rule, numbers, "Set 2 or more, or schedule=1F1B"


class VSchedule(ScheduleBase):
    """Two stages a rank, placed down the ranks and back up, so that rank 0 holds the first and the last stage."""

    def stage_ranks(self, pipeline_size: int, stages_per_rank: int) -> tuple[int, ...]:
        """The pipeline rank of each stage: a V."""
        return v_placement(pipeline_size) if pipeline_size > 1 else (0,) * stages_per_rank

    def refuse(self, pipeline_size: int, stages_per_rank: int, num_microbatches: int) -> Refusal | None:
        """The V has two legs."""
        if pipeline_size == 1 or stages_per_rank == 2:
            return None
        rule = f"the schedule {self.name} places exactly two stages on each rank, as a V"
        numbers = f"{stages_per_rank} on each of {pipeline_size} ranks were asked for"
        return "stages_per_rank", stages_per_rank, rule, numbers, "Set 2"


def looped_slots(rank: int, sizes: Sizes, backward: bool) -> Iterator[Slot]:
    """Stages and micro-batches of a rank, depth first: `pipeline_size` micro-batches through one stage, then the next.

    >>> list(looped_slots(1, Sizes(2, 2, 4), backward=False))
    [(1, 0), (1, 1), (3, 0), (3, 1), (1, 2), (1, 3), (3, 2), (3, 3)]
    """
    stages: Sequence[int] = range(rank, sizes.num_stages, sizes.pipeline_size)
    for first in range(0, sizes.num_microbatches, sizes.pipeline_size):
        for stage in reversed(stages) if backward else stages:
            for micro_batch in range(first, first + sizes.pipeline_size):
                yield stage, micro_batch


def v_streams(rank: int, sizes: Sizes) -> dict[str, Iterator[Slot]]:
    """`F0` to `W1`: the passes of the down-leg stage (0) and the up-leg stage (1) of a rank, each micro-batch once and in order.

    A whole backward pass `B0` and an input pass `I0` take turns on one stream, since a micro-batch has one of them.
    """
    streams: dict[str, Iterator[Slot]] = {}
    for leg, stage in (("0", rank), ("1", sizes.num_stages - 1 - rank)):
        for kind in "FIW":
            streams[kind + leg] = iter([(stage, each) for each in range(sizes.num_microbatches)])
        streams["B" + leg] = streams["I" + leg]
    return streams


def _rank_cells(schedule: ScheduleBase, rank: int, sizes: Sizes) -> tuple[Cell, ...]:
    if sizes.pipeline_size == 1:
        return tuple(one_rank_order(sizes.num_stages, sizes.num_microbatches))
    playable = schedule.playable_count(sizes.pipeline_size, sizes.num_microbatches)
    cells = schedule.order(rank, Sizes(sizes.pipeline_size, sizes.stages_per_rank, playable))
    return tuple(cell for cell in cells if cell.micro_batch < sizes.num_microbatches)


@lru_cache(maxsize=64)
def _build(schedule: ScheduleBase, sizes: Sizes) -> ScheduleTable:
    ranks = tuple(_rank_cells(schedule, rank, sizes) for rank in range(sizes.pipeline_size))
    placement = schedule.stage_ranks(sizes.pipeline_size, sizes.stages_per_rank)
    return ScheduleTable(schedule.name, sizes.num_stages, sizes.num_microbatches, ranks, placement)


@lru_cache(maxsize=4096)
def _bubble_fraction(schedule: ScheduleBase, sizes: Sizes) -> float:
    return unit_bubble_fraction(_build(schedule, sizes))
