"""Plays a schedule table: the one runtime for every schedule, and for a single stage.

A rank plays its cells strictly in order. A cell that needs another rank's result waits for it; results are sent without waiting.
The player knows nothing of models: a `StageRunner` runs a stage's forward pass, autograd does the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from hybrid_strategy.parallel.routes import RankRoutes, Route, rank_routes
from hybrid_strategy.parallel.split_backward import WeightWork, backward_input, backward_weight, weights_later
from hybrid_strategy.parallel.stopwatch import Stopwatch
from hybrid_strategy.parallel.transport import Message, Transport
from hybrid_strategy.parallel.trees import detach_leaf, map_tensors, tensors_of
from hybrid_strategy.spec.table import BACKWARD, FORWARD, INPUT, WEIGHT, Cell, ScheduleTable


class StageRunner(Protocol):
    """Runs stages for the player."""

    def forward(self, stage: int, micro_batch: int, received: Any) -> Any:
        """The stage's output: a nested value of tensors to hand on, or on the last stage the scalar to differentiate."""

    def first_half(self) -> AbstractContextManager[None]:
        """Around the first half of a split backward pass, which leaves gradients of weights incomplete."""

    def before_weight(self, weight: nn.Parameter) -> None:
        """Called in a weight pass before the gradient of one that waited for it is made."""

    def before_backward(self, stage: int, micro_batch: int) -> None:
        """Called before the pass that makes the gradients of this stage's weights."""

    def after_backward(self, stage: int, micro_batch: int) -> None:
        """Called when all gradients of this stage and micro-batch are there."""


class _Held:
    """What a stage keeps of a micro-batch between its forward and its backward."""

    def __init__(self, inputs: list[Tensor], outputs: list[Tensor], refused: bool) -> None:
        self.inputs, self.outputs = inputs, outputs
        self.refused = refused
        """The outputs were not sent. Their backward pass is played all the same: other ranks may gather weights with it."""
        self.weight_work: WeightWork | None = None


def _differentiable(value: Any) -> list[Tensor]:
    return [tensor for _, tensor in tensors_of(value) if tensor.requires_grad]


class Player:
    """Plays tables on one pipeline rank.

    Args:
        rank: this pipeline rank.
        transport: moves messages; `None` where there is one pipeline rank.
        at: told of each cell that begins.
    """

    def __init__(self, rank: int, transport: Transport | None, at: Callable[[Cell], None] = lambda cell: None) -> None:
        self._rank, self._transport, self._at = rank, transport, at
        self.peak_in_flight = 0
        self.stopwatch: Stopwatch | None = None

    def play(self, table: ScheduleTable, runner: StageRunner, signatures: Sequence[Hashable]) -> None:
        """Plays this rank's cells. `signatures[j]` tells the shapes of micro-batch `j` from those of others."""
        run = _Run(table, runner, signatures, rank_routes(table, self._rank), self._transport)
        run.stopwatch = self.stopwatch
        split = any(cell.kind == WEIGHT for cells in table.ranks for cell in cells)
        with weights_later(split), self.stopwatch.play() if self.stopwatch is not None else nullcontext():
            self._play(table.ranks[self._rank], run)

    def _play(self, cells: Sequence[Cell], run: _Run) -> None:
        for index, cell in enumerate(cells):
            self._at(cell)
            run.post(cell)
            if index + 1 < len(cells):
                run.post_ahead(cells[index + 1])
            run.cell(cell)
            self.peak_in_flight = max(self.peak_in_flight, len(run.held))
        if self._transport is not None:
            self._transport.finish()


class _Run:
    """One play of one table."""

    def __init__(
        self,
        table: ScheduleTable,
        runner: StageRunner,
        signatures: Sequence[Hashable],
        routes: RankRoutes,
        transport: Transport | None,
    ) -> None:
        self.table, self.runner, self.signatures, self.routes, self.transport = table, runner, signatures, routes, transport
        self.held: dict[tuple[int, int], _Held] = {}
        self._local: dict[Cell, Any] = {}
        self._posted = dict.fromkeys(routes.arrivals, 0)
        self._grad = any(cell.kind != FORWARD for cells in table.ranks for cell in cells)
        self.stopwatch: Stopwatch | None = None

    def cell(self, cell: Cell) -> None:
        if cell.kind == FORWARD:
            self._forward(cell)
        elif cell.kind == BACKWARD:
            self._backward(cell)
        elif cell.kind == INPUT:
            self._backward_input(cell)
        else:
            self._backward_weight(cell)

    def post(self, cell: Cell) -> None:
        """Starts receiving what `cell` waits for, and before it all that its sender sends earlier."""
        route = self.routes.waits.get(cell)
        if route is None or self.transport is None:
            return
        queue = self.routes.arrivals[route.source]
        upto = queue.index(route) + 1
        for each in queue[self._posted[route.source] : upto]:
            self.transport.post(self._message(each))
        self._posted[route.source] = max(self._posted[route.source], upto)

    def post_ahead(self, cell: Cell) -> None:
        """The same for the next cell, so that its data travels during this one, as far as no waiting is needed for it."""
        route = self.routes.waits.get(cell)
        if route is None or self.transport is None:
            return
        queue = self.routes.arrivals[route.source]
        missing = queue[self._posted[route.source] : queue.index(route) + 1]
        if all(self.transport.knows(self._message(each)) for each in missing):
            self.post(cell)

    def _message(self, route: Route) -> Message:
        cell = route.cell
        key = (cell.stage, cell.kind == FORWARD, self._grad, self.signatures[cell.micro_batch])
        return Message(route.source, route.destination, route.tag, key)

    def _hand_on(self, cell: Cell, value: Any) -> None:
        route = self.routes.sends.get(cell)
        if route is None:
            self._local[cell] = value
        elif self.transport is not None:
            self.transport.send(self._message(route), value)

    def _take(self, cell: Cell, sources: Sequence[Cell]) -> Any:
        route = self.routes.waits.get(cell)
        if route is not None and self.transport is not None:
            with self.stopwatch.wait() if self.stopwatch is not None else nullcontext():
                return self.transport.receive(self._message(route))
        return next(self._local.pop(source) for source in sources if source in self._local)

    def _forward(self, cell: Cell) -> None:
        received: Any = None
        if cell.stage > 0:
            value = self._take(cell, [Cell(cell.stage - 1, FORWARD, cell.micro_batch)])
            received = map_tensors(lambda _, tensor: detach_leaf(tensor), value)
        output = made = self.runner.forward(cell.stage, cell.micro_batch, received)
        if cell.stage < self.table.num_stages - 1:
            route = self.routes.sends.get(cell)
            if route is not None and self.transport is not None:
                output = self.transport.checked(self._message(route), output)
            self._hand_on(cell, output)
        if self._grad:
            outputs = self._handed_on(cell, output) if output is made else _differentiable(made)
            self.held[cell.stage, cell.micro_batch] = _Held(_differentiable(received), outputs, output is not made)

    def _handed_on(self, cell: Cell, output: Any) -> list[Tensor]:
        """Tensors of a stage's output of which gradients come back; some may be frozen since the other end was told of them."""
        route = self.routes.sends.get(cell)
        if route is None or self.transport is None:
            return _differentiable(output)
        return self.transport.wanted(self._message(route), output)

    def _output_gradients(self, cell: Cell, held: _Held) -> tuple[list[Tensor], list[Tensor | None]]:
        """What of the outputs is to be differentiated, and with which gradients."""
        outputs = held.outputs
        if cell.stage == self.table.num_stages - 1:
            return outputs, [None] * len(outputs)
        after = [Cell(cell.stage + 1, kind, cell.micro_batch) for kind in (BACKWARD, INPUT)]
        gradients = [gradient for _, gradient in tensors_of(self._take(cell, after))]
        if held.refused:
            return outputs, [torch.zeros_like(each) for each in outputs]
        either_failed = not outputs or not gradients  # a stage that could not be played hands nothing on
        pairs = [each for each in zip(outputs, gradients, strict=not either_failed) if each[0].requires_grad]
        return [output for output, _ in pairs], [gradient for _, gradient in pairs]

    def _return_gradients(self, cell: Cell, inputs: list[Tensor]) -> None:
        """Sends the gradients of a stage's inputs back; an input that nothing depends on has a gradient of zeros.

        A message goes back even when no input wants a gradient, so that both ends agree on what is sent.
        """
        if cell.stage > 0:
            gradients = [torch.zeros_like(each) if each.grad is None else each.grad for each in inputs]
            self._hand_on(cell, gradients)

    def _backward(self, cell: Cell) -> None:
        held = self.held.pop((cell.stage, cell.micro_batch))
        outputs, gradients = self._output_gradients(cell, held)
        self.runner.before_backward(cell.stage, cell.micro_batch)
        if outputs:
            torch.autograd.backward(outputs, gradients)
        self._return_gradients(cell, held.inputs)
        self.runner.after_backward(cell.stage, cell.micro_batch)

    def _backward_input(self, cell: Cell) -> None:
        held = self.held[cell.stage, cell.micro_batch]
        outputs, gradients = self._output_gradients(cell, held)
        with self.runner.first_half():
            held.weight_work = backward_input(outputs, gradients, held.inputs)
        self._return_gradients(cell, held.inputs)
        held.inputs, held.outputs = [], []

    def _backward_weight(self, cell: Cell) -> None:
        held = self.held.pop((cell.stage, cell.micro_batch))
        self.runner.before_backward(cell.stage, cell.micro_batch)
        if held.weight_work is not None:
            backward_weight(held.weight_work, self.runner.before_weight)
        self.runner.after_backward(cell.stage, cell.micro_batch)
