"""A step: the user's own step once a micro-batch, in the order of a schedule table, with one result as if it were one call."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from hybrid_strategy.distributed.groups import Groups
from hybrid_strategy.parallel.player import Player
from hybrid_strategy.parallel.stages import StageNow, StageOutput
from hybrid_strategy.parallel.transport import Transport
from hybrid_strategy.parallel.trees import Cut, cut_batch, tensors_of
from hybrid_strategy.parallelize import Parallelized
from hybrid_strategy.planning.layouts import find_schedule
from hybrid_strategy.spec.table import ScheduleTable
from hybrid_strategy.strategy.outputs import StepLoss, combine_outputs, read_loss
from hybrid_strategy.strategy.routed_log import Combined, LogExchange, LogRecorder, replay

_TOKENS_PER_ROW = 1024.0
"""Keeps loss weights near 1 while tokens are not counted yet, for the range of half precision; any number is right."""


@dataclass
class StepCall:
    """One call of a user's step by Lightning.

    Attributes:
        kind: `train`, `validate`, `test` or `predict`.
        function: the user's step.
        context: makes the precision context of one forward pass.
        arguments: what Lightning passes after the batch.
        real_rows: samples of this rank's batch that count; 0 where the batch only keeps the rank busy. `None`: all.
        run_rows: samples of this step on all data-parallel ranks together. `None`: not known, the ranks add them up.
    """

    kind: str
    function: Callable[..., Any]
    context: Callable[[], AbstractContextManager[Any]]
    batch: Any
    arguments: tuple[Any, ...]
    real_rows: int | None = None
    run_rows: int | None = None


@dataclass
class _Play:
    """The state of one play: what the runner's passes share."""

    call: StepCall
    cut: Cut
    run_rows: float
    loss_scale: float
    losses: list[StepLoss] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)


class StepEngine:
    """Plays steps of one module in one layout.

    Args:
        module: the user's module, parallelised.
        made: what `parallelize` made of it.
        groups: this rank's place.
        microbatches_of: rows of a batch -> number of micro-batches.
        batch_dims: batch key -> batch dimension, where it is not 0.
    """

    def __init__(
        self,
        module: LightningModule,
        made: Parallelized,
        groups: Groups,
        microbatches_of: Callable[[int], int],
        batch_dims: Mapping[str, int | None],
        device: torch.device,
    ) -> None:
        self.module, self.made, self.groups, self.device = module, made, groups, device
        self._microbatches_of, self._batch_dims = microbatches_of, batch_dims
        layout = groups.layout
        self._schedule = find_schedule(layout.schedule)
        self._rank = groups.coordinate.pipeline_parallel
        pipelined = layout.pipeline_parallel_size > 1
        self.player = Player(self._rank, Transport(groups, device) if pipelined else None)
        self._recorder = LogRecorder(module, pipelined)
        self._exchanges: dict[str, LogExchange] = {}
        self._tables: dict[tuple[int, bool], ScheduleTable] = {}
        self._last_stage = layout.num_stages - 1
        self._play: _Play | None = None
        self._correction = 1.0
        self.last_loss: Tensor | None = None

    def table(self, num_microbatches: int, train: bool) -> ScheduleTable:
        """The table of so many micro-batches."""
        key = (num_microbatches, train)
        if key not in self._tables:
            layout = self.groups.layout
            table = self._schedule.build(layout.pipeline_parallel_size, layout.stages_per_rank, num_microbatches)
            self._tables[key] = table if train else table.forward_only()
        return self._tables[key]

    @property
    def holds_last_stage(self) -> bool:
        return self._last_stage_rank == self._rank

    @property
    def _last_stage_rank(self) -> int:
        layout = self.groups.layout
        return self._schedule.stage_ranks(layout.pipeline_parallel_size, layout.stages_per_rank)[-1]

    # ------------------------------------------------------------------------------------------------------- steps

    def train(self, call: StepCall, loss_scale: float) -> tuple[Tensor, Any]:
        """Forward and backward of all micro-batches; gradients are held aside until `hand_over`.

        Returns:
            The loss of the whole run's batch (mean over all its rows or tokens), and what the user's step returned.
        """
        cut = self._cut(call)
        play = _Play(call, cut, self._run_rows(call, cut), loss_scale)
        self.made.sharding.begin()
        try:
            self._run(play, train=True)
        finally:
            self.made.sharding.end()
        self.made.sharding.take()
        combined = self._finish_training(play)
        total, _, expected = combined.sums.tolist()
        self._correction = expected / total if total else 1.0
        self.last_loss = (combined.sums[1] / combined.sums[0]).float()
        output = combine_outputs(play.outputs, cut.rows) if play.outputs else self.last_loss
        return self.last_loss, output

    def evaluate(self, call: StepCall) -> Any:
        """Forward passes only; returns what the user's step returned, joined over micro-batches (`None` off the last stage)."""
        cut = self._cut(call)
        play = _Play(call, cut, 1.0, 1.0)
        self.made.sharding.begin()
        try:
            self._run(play, train=False)
        finally:
            self.made.sharding.end()
        self._share(call.kind, ())
        return combine_outputs(play.outputs, cut.rows) if play.outputs else None

    def hand_over(self, gradient_scale: float) -> None:
        """Adds the gradients of the last `train` to the accumulation window; `gradient_scale` is what autograd asks for."""
        self.made.sharding.hand_over(gradient_scale * self._correction)

    # ------------------------------------------------------------------------------------------------ StageRunner

    def forward(self, stage: int, micro_batch: int, received: Any) -> Any:
        """Runs the user's step on one micro-batch, as far as `stage` goes."""
        play = self._now
        start, stop = self.made.bounds[stage], self.made.bounds[stage + 1]
        now = StageNow(start, stop, stage == self._last_stage, received)
        try:
            with self._recorder.recording(), play.call.context(), self.made.context.play(now):
                output = play.call.function(play.cut.micro_batches[micro_batch], *play.call.arguments)
        except StageOutput as leaving:
            return leaving.value
        return self._finish_forward(play, output, micro_batch)

    def weights(self, stage: int) -> list[nn.Parameter]:
        return [slot.parameter for slot in self.made.stage_slots[stage] if slot.parameter.requires_grad]

    def after_backward(self, stage: int, micro_batch: int) -> None:
        self.made.sharding.after_backward(self.made.stage_slots[stage])

    # ---------------------------------------------------------------------------------------------------- details

    @property
    def _now(self) -> _Play:
        if self._play is None:
            raise RuntimeError("a stage is played outside of a step")
        return self._play

    def _cut(self, call: StepCall) -> Cut:
        cut = cut_batch(call.batch, 1, self._batch_dims)
        parts = min(self._microbatches_of(cut.num_rows), cut.num_rows)
        cut = cut if parts == 1 else cut_batch(call.batch, parts, self._batch_dims)
        if call.real_rows == 0:
            return Cut(cut.micro_batches, [0] * len(cut.rows))
        return cut

    def _run_rows(self, call: StepCall, cut: Cut) -> float:
        """Samples of this step on all data-parallel ranks: the loss is the mean over them, so every rank must know it first."""
        if call.run_rows is not None:
            return float(max(call.run_rows, 1))
        if self.groups.data is None:
            return float(max(cut.num_rows, 1))
        rows = torch.tensor([float(cut.num_rows)], dtype=torch.float64, device=self.device)
        dist.all_reduce(rows, group=self.groups.data)
        return max(rows.item(), 1.0)

    def _run(self, play: _Play, train: bool) -> None:
        self._play = play
        signatures = [_signature(each) for each in play.cut.micro_batches]
        try:
            self.player.play(self.table(len(play.cut.rows), train), self, signatures)
        finally:
            self._play = None

    def _finish_forward(self, play: _Play, output: Any, micro_batch: int) -> Any:
        rows = float(play.cut.rows[micro_batch])
        play.outputs.append(_detached(output))
        if play.call.kind != "train":
            self._recorder.commit(rows)
            return None
        found = read_loss(output, rows)
        if play.call.real_rows == 0:
            found = replace(found, weight=0.0)
        self._recorder.commit(found.weight)
        play.losses.append(replace(found, loss=found.loss.detach()))
        return found.loss * (found.weight / self._expected(play, found.counts_tokens) * play.loss_scale)

    def _expected(self, play: _Play, counts_tokens: bool) -> float:
        """The denominator of loss weights, the same on all data-parallel ranks.

        By rows it is exact. Tokens are counted only while the step runs: they are divided by a round number first, and
        gradients are corrected when all tokens are known.
        """
        return play.run_rows * (_TOKENS_PER_ROW if counts_tokens else 1.0)

    def _finish_training(self, play: _Play) -> Combined:
        """Shares loss and logs; `sums` of the result are the run's weight, its weighted loss, and this rank's denominator."""
        zero = torch.zeros((), dtype=torch.float64, device=self.device)
        total = zero + sum(each.weight for each in play.losses)
        weighted = sum((each.loss.double() * each.weight for each in play.losses if each.weight), zero)
        counts_tokens = any(each.counts_tokens for each in play.losses)
        return self._share("train", (total, weighted), (self._expected(play, counts_tokens),))

    def _share(self, kind: str, sums: Sequence[Tensor], own: Sequence[float] = ()) -> Combined:
        records = self._recorder.take()
        combined = self._exchange(kind).combine(records, sums, own)
        replay(combined, records.metrics, self.module.log)
        return combined

    def _exchange(self, kind: str) -> LogExchange:
        if kind not in self._exchanges:
            self._exchanges[kind] = LogExchange(self.groups, self.device, self._last_stage_rank)
        return self._exchanges[kind]


def _signature(micro_batch: Any) -> Hashable:
    return tuple((path, tuple(tensor.shape), tensor.dtype) for path, tensor in tensors_of(micro_batch))


def _detached(output: Any) -> Any:
    if isinstance(output, Tensor):
        return output.detach()
    if isinstance(output, Mapping):
        return {key: _detached(each) for key, each in output.items()}
    return output
