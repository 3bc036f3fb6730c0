"""The order in which to bring a run up: one thing at a time, each step a command with what to compare.

Data parallelism, activation checkpointing, sharded states, pipeline, tensor parallelism. The first steps run the model with so
few layers that they fit without what comes later, and keep that size, so that losses can be compared. The last one is the whole
model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from hybrid_strategy.planning.decision import SLOW_RECOMPUTATION
from hybrid_strategy.planning.forecast import Forecast, forecast
from hybrid_strategy.planning.reasons import strategy_overrides
from hybrid_strategy.planning.search import Question
from hybrid_strategy.spec.layout import Layout

SHORTEST = 512
"""No sequence is made shorter than this to bring a run up."""


@dataclass(frozen=True)
class LadderStep:
    """One run: its overrides, what to compare with the step before, and what is expected."""

    name: str
    overrides: tuple[str, ...]
    compare: str
    forecast: Forecast


def ladder(question: Question, winner: Forecast) -> list[LadderStep]:
    """The steps to the winner; those that it does not use, and those that do not fit even so, are left out."""
    short = _short_enough(question, winner)
    micro, steps = winner.scenario.micro_batch_size, []
    for name, layout, compare in _layouts(question, _shortened(winner.scenario.layout, short.shape.num_layers)):
        found = forecast(short.scenario(layout, micro), play=False)
        if found.fits:
            steps.append(LadderStep(name, (*_sizes(question, short), *strategy_overrides(found)), compare, found))
    whole = "forecast and measured step time, memory and MFU within 15 %"
    return [*steps, LadderStep("the whole model", strategy_overrides(winner), whole, winner)]


def _sizes(question: Question, short: Question) -> tuple[str, ...]:
    """What makes the model short, and the batch wide enough for data parallelism alone."""
    names = ("num_layers", "sequence_length")
    changed = [name for name in names if getattr(short.shape, name) != getattr(question.shape, name)]
    batch = short.global_batch_size
    wider = (f"data.global_batch_size={batch}",) if batch != question.global_batch_size else ()
    return (*(f"model.{name}={getattr(short.shape, name)}" for name in changed), *wider)


def _layouts(question: Question, goal: Layout) -> Iterator[tuple[str, Layout, str]]:
    world = question.processes
    layout = Layout(data_parallel_size=world)
    yield "data parallel", layout, "loss falls; tokens/s grow with the GPUs (98 % and more inside a node)"
    if goal.activation_checkpoint != "none":
        layout = replace(layout, activation_checkpoint=goal.activation_checkpoint)
        most = SLOW_RECOMPUTATION if goal.activation_checkpoint == "full" else 0.15
        yield "activation checkpoint", layout, f"same loss; activations shrink; step at most {most:.0%} longer"
    if goal.sharding != "ddp":
        layout = replace(layout, sharding=goal.sharding)
        cost = "step about as long" if goal.sharding != "zero3" else "half as many bytes again"
        yield goal.sharding, layout, f"same loss; states shrink by the data-parallel size; {cost}"
    if goal.pipeline_parallel_size > 1:
        layout = replace(layout, pipeline_parallel_size=goal.pipeline_parallel_size, schedule=goal.schedule)
        layout = replace(layout, stages_per_rank=goal.stages_per_rank, data_parallel_size=world // goal.pipeline_parallel_size)
        yield "pipeline", layout, "same loss; measured bubble near the forecast; slowest stage within 10 % of the mean"
    if goal.tensor_parallel_size > 1:
        yield (
            "tensor parallel",
            replace(goal, data_parallel_replicate_size=1),
            "same loss; memory per GPU falls; MFU near the plan",
        )


def _shortened(goal: Layout, layers: int) -> Layout:
    """The goal with no more stages than layers; one stage a rank is played as 1F1B."""
    chunks = min(goal.stages_per_rank, max(1, layers // goal.pipeline_parallel_size))
    return goal if chunks == goal.stages_per_rank else replace(goal, stages_per_rank=1, schedule="1F1B")


def _short_enough(question: Question, winner: Forecast) -> Question:
    """The model with so few layers (at least one a pipeline rank), then so short a sequence, that plain data parallelism fits.

    The batch gives every process a micro-batch.
    """
    layout, micro = Layout(data_parallel_size=question.processes), winner.scenario.micro_batch_size
    each = question.processes * micro * int(question.fixed.get("accumulate_grad_batches", 1))
    question = replace(question, global_batch_size=-(-question.global_batch_size // each) * each)
    least = winner.scenario.layout.pipeline_parallel_size
    layers, length = question.shape.num_layers, question.shape.sequence_length
    while True:
        short = replace(question, shape=replace(question.shape, num_layers=layers, sequence_length=length))
        if forecast(short.scenario(layout, micro), play=False).fits or (layers == least and length <= SHORTEST):
            return short
        if layers > least:
            layers = max(least, layers // 2)
        else:
            length //= 2
