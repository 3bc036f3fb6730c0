"""One thing to forecast: a model, a layout, a batch, machines, and how they compute. All other files of planning take it."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import cast

from hybrid_strategy import registry
from hybrid_strategy.planning.balance import cut_units, layer_like, parameter_costs
from hybrid_strategy.planning.numerics import NUMERICS, Numerics
from hybrid_strategy.planning.parameters import decoder_units
from hybrid_strategy.planning.stacks import ENGINE, Stack, stack_for
from hybrid_strategy.spec.batch import BatchSpec
from hybrid_strategy.spec.cluster import ClusterSpec
from hybrid_strategy.spec.layout import Layout
from hybrid_strategy.spec.model_shape import ModelShape
from hybrid_strategy.spec.plan import Plan
from hybrid_strategy.spec.schedule import Schedule


@dataclass(frozen=True)
class Scenario:
    """What is to be forecast.

    Attributes:
        stage_layers: blocks of each stage, in order; empty: the engine's own cut.
        schedule_part: a schedule that is not in the registry.
        recompute_fraction: share of a block's forward pass that `selective` repeats, where it is known better than
            by the stack's kind.
    """

    shape: ModelShape
    layout: Layout
    batch: BatchSpec
    cluster: ClusterSpec = field(default_factory=ClusterSpec)
    numerics: Numerics = NUMERICS["mixed"]
    stack: Stack = ENGINE
    stage_layers: tuple[int, ...] = ()
    schedule_part: Schedule | None = None
    recompute_fraction: float | None = None

    @cached_property
    def schedule(self) -> Schedule:
        """The schedule that the layout names."""
        if self.schedule_part is not None:
            return self.schedule_part
        return cast("Schedule", registry.find("schedules", self.layout.schedule, "strategy.schedule"))

    @cached_property
    def layers_of_stage(self) -> tuple[int, ...]:
        return self.stage_layers or balanced_stage_layers(self.shape, self.layout.num_stages)

    @cached_property
    def stages_of_rank(self) -> tuple[tuple[int, ...], ...]:
        """The stages that each pipeline rank holds."""
        size = self.layout.pipeline_parallel_size
        if size == 1:
            return (tuple(range(self.layout.num_stages)),)
        return _stages_of_rank(self.schedule.stage_ranks(size, self.layout.stages_per_rank), size)

    @property
    def micro_batch_size(self) -> int:
        return self.batch.micro_batch_size(self.layout.data_parallel_size)

    @property
    def tokens(self) -> float:
        """Tokens of a micro-batch on one rank: b s, shared out over context-parallel ranks."""
        return self.micro_batch_size * self.shape.sequence_length / self.layout.context_parallel_size

    @property
    def sequence_split(self) -> int:
        """Ranks over which the parts outside products are split: tensor-parallel ranks under sequence parallelism, else 1."""
        return self.layout.tensor_parallel_size if self.layout.sequence_parallel else 1

    @property
    def step_tokens(self) -> float:
        """Tokens of an optimizer step, all ranks together."""
        return self.batch.global_batch_size * self.shape.sequence_length

    @cached_property
    def block_parameters(self) -> float:
        """Parameters of one tensor-parallel rank's part of a block; norms and output biases stay whole."""
        shape = self.shape
        whole = shape.hidden_size * (6 if shape.bias else 2)
        return whole + (shape.layer_parameters - whole) / self.layout.tensor_parallel_size

    def end_parameters(self, stage: int) -> float:
        """Parameters of the embedding and of the final norm and head, where `stage` has them; a tied head is held again."""
        shape, total = self.shape, 0.0
        vocabulary = shape.vocab_size * shape.hidden_size / self.layout.tensor_parallel_size
        if stage == 0:
            total += vocabulary + (shape.embedding_parameters - shape.vocab_size * shape.hidden_size)
        if stage == self.layout.num_stages - 1:
            total += shape.hidden_size * (2 if shape.bias else 1)
            total += 0.0 if shape.tied_embeddings and stage == 0 else vocabulary
        return total

    @cached_property
    def _blocks_of_ranks(self) -> tuple[int, ...]:
        return _blocks_of_ranks(self.layers_of_stage, self.stages_of_rank)

    def blocks_of(self, rank: int) -> int:
        """Blocks that pipeline rank `rank` holds."""
        return self._blocks_of_ranks[rank]

    def rank_parameters(self, rank: int) -> float:
        """Parameters of one tensor-parallel rank of pipeline rank `rank`."""
        ends = sum(self.end_parameters(stage) for stage in self.stages_of_rank[rank])
        return self.blocks_of(rank) * self.block_parameters + ends


@lru_cache(maxsize=1024)
def _blocks_of_ranks(layers: tuple[int, ...], stages: tuple[tuple[int, ...], ...]) -> tuple[int, ...]:
    return tuple(sum(layers[stage] for stage in held) for held in stages)


@lru_cache(maxsize=256)
def _stages_of_rank(owners: tuple[int, ...], num_ranks: int) -> tuple[tuple[int, ...], ...]:
    """Shared by all scenarios of a search: there are few placements and many scenarios."""
    held: list[list[int]] = [[] for _ in range(num_ranks)]
    for stage, owner in enumerate(owners):
        held[owner].append(stage)
    return tuple(map(tuple, held))


@lru_cache(maxsize=1024)
@lru_cache(maxsize=1024)
def balanced_stage_layers(shape: ModelShape, num_stages: int) -> tuple[int, ...]:
    """Blocks of each stage by the engine's own cut.

    >>> balanced_stage_layers(ModelShape(8192, 80, 64, 28672, 128256, 8192, num_key_value_heads=8), 4)
    (20, 20, 21, 19)

    Raises:
        LayoutError: more stages than layers.
    """
    units = decoder_units(shape)
    costs = parameter_costs([unit.num_parameters for unit in units], [unit.embedding for unit in units])
    return tuple(sum(layer_like(stage)) for stage in cut_units([unit.name for unit in units], num_stages, costs))


def planned_scenario(plan: Plan, shape: ModelShape, cluster: ClusterSpec, numerics: Numerics, stack: Stack = ENGINE) -> Scenario:
    """The scenario of a run whose plan is made: what `train` prints its measured values beside."""
    stages = tuple(sum(layer_like(units)) for units in plan.stage_units)
    stack = stack_for(plan.layout.compile, stack)
    return Scenario(shape, plan.layout, plan.batch, cluster, numerics, stack, stage_layers=stages)
