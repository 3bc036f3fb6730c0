"""Puts everything decided about a run into one plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hybrid_strategy.planning.balance import cut_units, parameter_costs
from hybrid_strategy.planning.layouts import find_schedule
from hybrid_strategy.planning.learning_rate import learning_rate_text, scaled_learning_rate
from hybrid_strategy.planning.parameters import Unit, count_parameters, decoder_units, rank_parameters
from hybrid_strategy.spec.batch import BatchSpec
from hybrid_strategy.spec.layout import Layout
from hybrid_strategy.spec.model_shape import ModelShape
from hybrid_strategy.spec.plan import Plan
from hybrid_strategy.spec.training import LearningRateSpec, OptimizerSpec


@dataclass(frozen=True)
class Decisions:
    """What a plan needs beside layout, batch and model.

    Attributes:
        optimizer: brings the base learning rate; None: the plan has no learning rate.
        learning_rate: scaling of the base rate with the batch.
        stage_cuts: index of the first unit of every stage but the first; None: the balanced cut.
        reasons: why the layout is what it is, for people.
    """

    optimizer: OptimizerSpec | None = None
    learning_rate: LearningRateSpec = field(default_factory=LearningRateSpec)
    stage_cuts: Sequence[int] | None = None
    reasons: tuple[str, ...] = ()


def build_plan(layout: Layout, batch: BatchSpec, model: ModelShape | Sequence[Unit], decisions: Decisions | None = None) -> Plan:
    """The plan of a run whose layout and batch were checked.

    Stages are cut by the engine's own rule (`parameter_costs`), so that the plan names what will be run.

    Args:
        model: the shape of a decoder, or the units of any model with their parameters.

    Raises:
        LayoutError: more stages than layers, or stage cuts that do not fit.

    >>> shape = ModelShape(64, 4, 4, 128, 512, 32)
    >>> plan = build_plan(Layout(pipeline_parallel_size=2), BatchSpec(8, num_microbatches=4), shape)
    >>> plan.stage_units[0], plan.bubble_fraction, sum(plan.rank_parameters) == plan.num_parameters == shape.num_parameters
    (('embed_tokens', 'layers.0', 'layers.1'), 0.2, True)
    """
    decided = decisions or Decisions()
    units = decoder_units(model) if isinstance(model, ModelShape) else tuple(model)
    by_name = {unit.name: unit for unit in units}
    costs = parameter_costs([unit.num_parameters for unit in units], [unit.embedding for unit in units])
    stages = cut_units(list(by_name), layout.num_stages, costs, decided.stage_cuts)
    schedule = find_schedule(layout.schedule)
    sizes = (layout.pipeline_parallel_size, layout.stages_per_rank)
    stage_ranks = schedule.stage_ranks(*sizes)
    in_flight = [schedule.max_in_flight(rank, *sizes, batch.num_microbatches) for rank in range(sizes[0])]
    return Plan(
        layout=layout,
        batch=batch,
        bubble_fraction=schedule.bubble_fraction(*sizes, batch.num_microbatches),
        stage_units=stages,
        rank_parameters=rank_parameters(layout, [[by_name[name] for name in stage] for stage in stages], stage_ranks),
        num_parameters=count_parameters(units),
        learning_rate=_peak(decided, batch),
        reasons=decided.reasons,
        extra={"stage_ranks": list(stage_ranks), "max_in_flight": in_flight, **_learning_rate(decided, batch, model)},
    )


def _learning_rate(decisions: Decisions, batch: BatchSpec, model: ModelShape | Sequence[Unit]) -> dict[str, str]:
    """The learning rate in words."""
    if decisions.optimizer is None:
        return {}
    tokens = batch.global_batch_size * model.sequence_length if isinstance(model, ModelShape) else 0
    text = learning_rate_text(decisions.optimizer, decisions.learning_rate, batch.global_batch_size, tokens)
    return {"learning_rate": text}


def _peak(decisions: Decisions, batch: BatchSpec) -> float | None:
    optimizer, scaling = decisions.optimizer, decisions.learning_rate
    if optimizer is None:
        return None
    base_batch, rule = scaling.base_batch_size, scaling.scaling
    return scaled_learning_rate(
        optimizer.learning_rate, batch.global_batch_size, base_batch, rule, scaling.exponent, optimizer.name
    )


def rank_map(layout: Layout, rank_parameters: Sequence[int] = ()) -> list[dict[str, int | str]]:
    """One row a rank, for printing: its number, its index along each mesh axis, its stages and, where given, its parameters.

    >>> rows = rank_map(Layout(tensor_parallel_size=2, pipeline_parallel_size=2), [10, 10, 12, 12])
    >>> rows[2]["pipeline_parallel"], rows[2]["tensor_parallel"], rows[2]["stages"], rows[2]["parameters"]
    (1, 0, '1', 12)
    """
    owners = find_schedule(layout.schedule).stage_ranks(layout.pipeline_parallel_size, layout.stages_per_rank)
    rows: list[dict[str, int | str]] = []
    for rank in range(layout.world_size):
        at = layout.coordinate(rank)
        stages = ", ".join(str(stage) for stage, owner in enumerate(owners) if owner == at.pipeline_parallel)
        parameters = {"parameters": rank_parameters[rank]} if rank_parameters else {}
        rows.append({"rank": rank, **vars(at), "stages": stages, **parameters})
    return rows
