"""What a pipeline rank holds where the backward pass is split (zero-bubble schedules): the worst moment of its own table.

Between its halves a pass keeps of every product the input and the gradient of the output (arXiv:2401.10241 section 2), the
head's among them. The loss is there only while the last stage's first half is played, so that it does not meet what the busiest
moment holds. All terms are counted (`hybrid plan --dry-run`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from hybrid_strategy.planning.activations import head_split_bytes, split_pass_bytes
from hybrid_strategy.planning.scenario import Scenario
from hybrid_strategy.spec.play import Held, held_halves
from hybrid_strategy.spec.table import BACKWARD


@dataclass(frozen=True)
class SplitWork:
    """The worst moment.

    Attributes:
        in_flight: passes before their backward pass.
        waiting: passes between its halves; `heads` of them are the last stage's.
        under_way: 2 while the loss is there, 1 in another backward pass, 0 in none.
    """

    in_flight: int
    waiting: int
    heads: int
    under_way: int

    @property
    def at_loss(self) -> bool:
        return self.under_way == 2

    @property
    def at_work(self) -> bool:
        return self.under_way > 0


def split_work(scenario: Scenario, rank: int, kept: float, logits: float, work: float) -> SplitWork | None:
    """The worst moment of pipeline rank `rank`; None where backward passes are whole.

    Args:
        kept: bytes that a block keeps of a pass.
        logits: bytes of the logits and the loss.
        work: bytes of one block's work in a backward pass.
    """
    layout = scenario.layout
    if layout.pipeline_parallel_size == 1 or not scenario.schedule.uses_weight_pass or not scenario.stack.plain_sharding:
        return None
    blocks = scenario.blocks_of(rank) / layout.stages_per_rank
    weights = kept * blocks, split_pass_bytes(scenario) * blocks, head_split_bytes(scenario)

    extra = 0.0, work, max(work, logits)

    def size(held: Held) -> float:
        return sum(number * each for number, each in zip(held, weights, strict=False)) + extra[held[3]]

    return SplitWork(*max(_moments(scenario, rank)[0], key=size))


def passing_bytes(scenario: Scenario, rank: int) -> float:
    """Gradients that a block's backward pass has on the way under such a schedule.

    They are those of the MLP's product and of both its halves, which wait until each is put aside; where the pass is whole, that
    of a weight before it is added to `.grad` may be larger.
    """
    numerics, shape, split = scenario.numerics, scenario.shape, scenario.layout.tensor_parallel_size
    columns, wide = shape.intermediate_size / split, numerics.compute_bytes
    rows = scenario.tokens * wide
    passing = (3 if shape.gated_mlp else 2) * columns * rows
    if 0 in scenario.stages_of_rank[rank] or _moments(scenario, rank)[1]:
        product = (wide + (numerics.parameter_bytes if numerics.cast_bytes else 0.0)) * columns * shape.hidden_size
        passing = max(passing, product)
    return passing + rows * shape.hidden_size


def _moments(scenario: Scenario, rank: int) -> tuple[tuple[Held, ...], bool]:
    layout = scenario.layout
    part: Any = scenario.schedule
    count = min(scenario.batch.num_microbatches, 2 * layout.pipeline_parallel_size)
    return _of_table(part, layout.pipeline_parallel_size, layout.stages_per_rank, count, rank)


@lru_cache(maxsize=4096)
def _of_table(schedule: Any, size: int, per_rank: int, count: int, rank: int) -> tuple[tuple[Held, ...], bool]:
    """Moments of a rank of a `Schedule`, of enough micro-batches (more repeat the same), and whether it plays whole passes."""
    cells = schedule.rank_order(rank, size, per_rank, count)
    return tuple(held_halves(cells, size * per_rank)), any(cell.kind == BACKWARD for cell in cells)
