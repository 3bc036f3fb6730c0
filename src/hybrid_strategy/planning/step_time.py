"""How long a step takes: stage passes from the roofline, the schedule played over them, and what happens around them."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property

from hybrid_strategy.planning.communication import Windows, communication_bill
from hybrid_strategy.planning.roofline import NOTHING, PassSeconds, Roofline
from hybrid_strategy.planning.scenario import Scenario
from hybrid_strategy.planning.simulate import PassCosts, simulate
from hybrid_strategy.spec.bill import CommunicationBill

STEP_LAUNCHES = 500
"""Launches a step that belong to no layer: data, loss scaling, norm of the gradients, logging."""

COLLECTIVE_LAUNCHES = 2
"""Launches of one collective, its synchronisation included."""

PASS_LAUNCHES = 16
"""Launches of one pass of a pipeline stage that belong to no layer: posting messages, entering autograd. They are why many small
stages a rank are slower than their bubble says: 4-8 % at three stages of one layer (arXiv:2401.10241 tables 4 and 5)."""

LAUNCH_POWER = 8
"""How sharply the slower of processor and GPU sets the pace: x and y take (x^8 + y^8)^(1/8), 9 % more than either if equal."""

PLAYED_CELLS = 20_000
"""Tables of more cells than this are not played; their bubble is the schedule's own fraction."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step by what they are spent on, for the rank that works most. The parts are the whole."""

    compute_seconds: float
    recompute_seconds: float
    launch_seconds: float
    tensor_parallel_seconds: float
    context_parallel_seconds: float
    pipeline_send_seconds: float
    bubble_seconds: float
    data_parallel_seconds: float
    optimizer_seconds: float
    overhead_seconds: float

    @property
    def step_seconds(self) -> float:
        return sum(getattr(self, each.name) for each in fields(self))  # type: ignore[no-any-return]

    @property
    def bubble_fraction(self) -> float:
        """Idle share of the schedule (of the step without reduction, update and overhead)."""
        played = self.step_seconds - self.data_parallel_seconds - self.optimizer_seconds - self.overhead_seconds
        return self.bubble_seconds / played if played else 0.0


@dataclass(frozen=True)
class StepModel:
    """The time model of one scenario."""

    scenario: Scenario

    @cached_property
    def roofline(self) -> Roofline:
        return Roofline(self.scenario)

    @property
    def microbatches(self) -> int:
        """Micro-batches of an optimizer step."""
        return self.scenario.batch.num_microbatches * self.scenario.batch.accumulate_grad_batches

    @cached_property
    def stage_compute(self) -> tuple[PassSeconds, ...]:
        """Computation of each stage over one micro-batch."""
        last = self.scenario.layout.num_stages - 1
        passes = []
        for stage, layers in enumerate(self.scenario.layers_of_stage):
            total = self.roofline.block.times(layers)
            total = total.plus(self.roofline.embedding if stage == 0 else NOTHING)
            passes.append(total.plus(self.roofline.head if stage == last else NOTHING))
        return tuple(passes)

    @cached_property
    def rank_compute(self) -> tuple[PassSeconds, ...]:
        """Computation of each pipeline rank over one micro-batch."""
        totals = []
        for stages in self.scenario.stages_of_rank:
            total = NOTHING
            for stage in stages:
                total = total.plus(self.stage_compute[stage])
            totals.append(total)
        return tuple(totals)

    @cached_property
    def busiest(self) -> int:
        """The pipeline rank that computes most."""
        work = [one.forward + one.backward for one in self.rank_compute]
        return work.index(max(work))

    # -- what a block waits for -------------------------------------------------------------------------------------------

    @cached_property
    def bill(self) -> CommunicationBill:
        """The communication bill of the busiest rank."""
        one, m = self.rank_compute[self.busiest], self.microbatches
        attention = m * self.scenario.blocks_of(self.busiest) * sum(self.roofline.attention)
        windows = Windows(m * one.forward, m * one.backward, one.forward, one.backward, attention)
        return communication_bill(self.scenario, windows, self.busiest)

    def exposed(self, axis: str) -> float:
        """Seconds a step that the messages along axes that start with `axis` are waited for."""
        return sum(line.exposed_seconds for line in self.bill.lines if line.axis.startswith(axis))

    @cached_property
    def launch_seconds(self) -> float:
        """What one block waits for its processor, and for kernels to start and end, over one micro-batch."""
        layout, kernels = self.scenario.layout, self.scenario.cluster.kernels
        passes = 4 if layout.activation_checkpoint == "full" else 3
        launches = passes * self.scenario.stack.launches
        if layout.tensor_parallel_size > 1:
            launches += (passes + 1) * COLLECTIVE_LAUNCHES
        block = self.roofline.block
        waits = self.exposed("tensor_parallel") / (self.microbatches * self.scenario.blocks_of(self.busiest))
        if self.scenario.cluster.synchronous:
            return launches * kernels.launch_seconds
        busy = block.forward + block.backward + waits
        running, launching = busy + launches * kernels.drain_seconds, launches * kernels.launch_seconds
        return float((running**LAUNCH_POWER + launching**LAUNCH_POWER) ** (1 / LAUNCH_POWER) - busy)

    @cached_property
    def block_waits(self) -> float:
        """Seconds that one block and micro-batch waits, both passes: processor, tensor- and context-parallel messages."""
        messages = self.exposed("tensor_parallel") + self.exposed("context_parallel")
        return self.launch_seconds + messages / (self.microbatches * self.scenario.blocks_of(self.busiest))

    @property
    def pass_seconds(self) -> float:
        """What one pass of a pipeline stage costs beside its layers."""
        piped = self.scenario.layout.pipeline_parallel_size > 1
        return PASS_LAUNCHES * self.scenario.cluster.kernels.launch_seconds if piped else 0.0

    @property
    def rank_launch_seconds(self) -> float:
        """What the busiest rank waits for its processor over one micro-batch."""
        passes = 2 * self.scenario.layout.stages_per_rank * self.pass_seconds
        return self.launch_seconds * self.scenario.blocks_of(self.busiest) + passes

    @cached_property
    def send_seconds(self) -> float:
        """One pipeline message."""
        lines = self.bill.along("pipeline_parallel")
        return lines[0].seconds / lines[0].calls if lines else 0.0

    # -- the schedule -----------------------------------------------------------------------------------------------------

    def pass_costs(self, send_seconds: float) -> PassCosts:
        """Times of every cell; where sends are not overlapped they hold up the sender too."""
        held = self.pass_seconds + (0.0 if self.scenario.stack.overlap_send else send_seconds)
        costs = {}
        for stage, (one, layers) in enumerate(zip(self.stage_compute, self.scenario.layers_of_stage, strict=True)):
            share = one.forward / (one.forward + one.backward)
            waits = layers * self.block_waits
            halves = {
                "I": one.input_gradient + one.recompute + (1 - share) * waits + held,
                "W": one.weight_gradient,
            }
            costs[stage] = {"F": one.forward + share * waits + held, "B": halves["I"] + halves["W"], **halves}
        return PassCosts(costs, default_send_seconds=send_seconds)

    def _played(self, busy: float) -> tuple[float, float]:
        """Bubble and exposed sends of one pass through the schedule, by playing its table."""
        layout, m = self.scenario.layout, self.scenario.batch.num_microbatches
        table = self.scenario.schedule.build(layout.pipeline_parallel_size, layout.stages_per_rank, m)
        without = simulate(table, self.pass_costs(0.0)).makespan_seconds
        with_sends = simulate(table, self.pass_costs(self.send_seconds)).makespan_seconds if self.send_seconds else without
        return max(0.0, without - busy), with_sends - without

    def _by_fraction(self, busy: float) -> tuple[float, float]:
        """Bubble and exposed sends of one pass through the schedule, by its own bubble fraction."""
        layout, m = self.scenario.layout, self.scenario.batch.num_microbatches
        p, v = layout.pipeline_parallel_size, layout.stages_per_rank
        fraction = self.scenario.schedule.bubble_fraction(p, v, m)
        work = [one.forward + one.backward for one in self.rank_compute]
        bubble = busy * fraction / (1 - fraction) * (sum(work) / p / max(work))
        path = 2 * (layout.num_stages - 1) * self.send_seconds
        steady = 0.0 if self.scenario.stack.overlap_send else 2 * v * m * self.send_seconds
        return bubble, path + steady

    def step_time(self, play: bool = True) -> StepTime:
        """The forecast; with `play=False` the bubble is the schedule's own fraction, which is quicker."""
        layout, batch, m = self.scenario.layout, self.scenario.batch, self.microbatches
        one = self.rank_compute[self.busiest]
        messages = (self.exposed("tensor_parallel") + self.exposed("context_parallel")) / m
        waits = self.rank_launch_seconds + messages
        busy = batch.num_microbatches * (one.forward + one.backward + waits)
        bubble, sends = 0.0, 0.0
        if layout.pipeline_parallel_size > 1:
            cells = 2 * layout.num_stages * batch.num_microbatches
            bubble, sends = self._played(busy) if play and cells <= PLAYED_CELLS else self._by_fraction(busy)
        return StepTime(
            compute_seconds=m * (one.forward + one.input_gradient + one.weight_gradient),
            recompute_seconds=m * one.recompute,
            launch_seconds=m * self.rank_launch_seconds,
            tensor_parallel_seconds=self.exposed("tensor_parallel"),
            context_parallel_seconds=self.exposed("context_parallel"),
            pipeline_send_seconds=sends * batch.accumulate_grad_batches,
            bubble_seconds=bubble * batch.accumulate_grad_batches,
            data_parallel_seconds=self.exposed("data_parallel"),
            optimizer_seconds=self._optimizer_seconds(),
            overhead_seconds=STEP_LAUNCHES * self.scenario.cluster.kernels.launch_seconds,
        )

    def _optimizer_seconds(self) -> float:
        layout = self.scenario.layout
        shared = 1 if layout.sharding == "ddp" else layout.shard_size * layout.context_parallel_size
        return self.roofline.optimizer_seconds(self.scenario.rank_parameters(self.busiest) / shared)
