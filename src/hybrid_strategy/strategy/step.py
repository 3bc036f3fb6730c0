"""A step: the user's own step once a micro-batch, in the order of a schedule table, with one result as if it were one call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import timedelta
from itertools import accumulate
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn

from hybrid_strategy.distributed.groups import Groups
from hybrid_strategy.parallel.compiled import uncompiled
from hybrid_strategy.parallel.frozen import ThawWatch
from hybrid_strategy.parallel.player import Player
from hybrid_strategy.parallel.stage_now import Crossing, StageNow, StageOutput
from hybrid_strategy.parallel.transport import Transport
from hybrid_strategy.parallel.trees import Cut, map_tensors
from hybrid_strategy.parallelize import Parallelized
from hybrid_strategy.planning.layouts import find_schedule
from hybrid_strategy.spec.table import ScheduleTable
from hybrid_strategy.strategy.batch_cutting import BatchCutter
from hybrid_strategy.strategy.cadence import Cadence
from hybrid_strategy.strategy.keeping import Keeping, Kept
from hybrid_strategy.strategy.log_exchange import Combined
from hybrid_strategy.strategy.outputs import read_loss, token_count, warn_of_sum
from hybrid_strategy.strategy.own_clipping import OwnClipping
from hybrid_strategy.strategy.peers import Peers
from hybrid_strategy.strategy.replicas import Replicas
from hybrid_strategy.strategy.routed_log import LogRouter
from hybrid_strategy.strategy.run_rows import RunRows
from hybrid_strategy.strategy.step_call import Play, PlayedAgain, StepCall, finished, signature_of
from hybrid_strategy.strategy.whereabouts import Whereabouts

_TOKENS_PER_ROW = 1024.0
"""Keeps loss weights near 1 while tokens are not counted yet, for the range of half precision; any number is right."""


class StepEngine:
    """Plays steps of one module in one layout.

    Args:
        module: the user's module, parallelised.
        made: what `parallelize` made of it.
        groups: this rank's place.
        microbatches_of: rows of a batch -> number of micro-batches.
        batch_dims: batch key -> batch dimension, where it is not 0.
        device: the rank's device.
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
        layout = groups.layout
        self._schedule = find_schedule(layout.schedule)
        self._rank = groups.coordinate.pipeline_parallel
        pipelined = layout.pipeline_parallel_size > 1
        self.last_stage_rank = self._schedule.stage_ranks(layout.pipeline_parallel_size, layout.stages_per_rank)[-1]
        self.whereabouts = Whereabouts(groups)
        self._transport = Transport(groups, device, made.context.refuse) if pipelined else None
        self.player = Player(self._rank, self._transport, self.whereabouts.at)
        self._thaw_watch = ThawWatch(groups, self._transport.forget) if self._transport is not None else None
        self.router = LogRouter(module, groups, device, self.last_stage_rank)
        self._keeping = Keeping(module, shares=pipelined)
        self._run_rows = RunRows(groups, device)
        self._cutter = BatchCutter(microbatches_of, batch_dims)
        self._tables: dict[tuple[int, bool], ScheduleTable] = {}
        self._last_stage = layout.num_stages - 1
        self._play: Play | None = None
        self._last_call: StepCall | None = None
        self._last_batch: tuple[Any, float] = (None, 0.0)
        self._correction = 1.0
        self._batches_in_window = 0
        self._last_backwards: frozenset[tuple[int, int]] = frozenset()
        self._in_one_stage = made.slots_in_one_stage()
        self.last_loss: Tensor | None = None
        self.cadence = Cadence()
        self.peers = Peers(groups, device, self.cadence)
        self.replicas = Replicas(made, groups, device, self.cadence)
        self._clipping = OwnClipping(made, groups, device)
        self._last_kind = ""

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
        return self.last_stage_rank == self._rank

    @property
    def playing(self) -> bool:
        """Does the user's step run now?"""
        return self._play is not None

    def attach(self, trainer: Trainer, timeout: timedelta, meet: Callable[[], None]) -> None:
        """Routes what `trainer` logs from now on, and watches that no step takes longer than a collective may.

        Args:
            meet: called by all ranks before they exchange what hooks logged.
        """
        self.router.attach(trainer, self.rows_of, self.whereabouts, (meet, self.peers.share_numbers))
        self.whereabouts.start_watch(timeout)
        self.peers.restart()
        self.cadence.restart()
        self._clipping.start()
        self._last_kind = ""
        if self._thaw_watch is not None:
            self._thaw_watch.restart()

    def release(self) -> None:
        """Gives the module back: nothing of it is watched any more."""
        self.router.metrics.release()
        self.whereabouts.stop_watch()
        self._clipping.stop()
        self.made.context.outside.meet = None
        self._last_call, self._last_batch = None, (None, 0.0)

    def rows_of(self, batch: Any) -> float:
        """Samples of a batch that count on this rank."""
        last, rows = self._last_batch
        return rows if batch is last else float(self._cutter.rows_of(batch))

    # ------------------------------------------------------------------------------------------------------- steps

    def train(self, call: StepCall, loss_scale: float) -> tuple[Tensor, Any]:
        """Forward and backward of all micro-batches; gradients are held aside until `hand_over`.

        Returns:
            The loss of the whole run's batch (mean over all its rows or tokens), and what the user's step returned.
        """
        cut = self._cut(call)
        play = Play(call, cut, self._run_rows.all(call, cut.num_rows), loss_scale)
        self._last_call = call
        if self._thaw_watch is not None:
            held = [self.made.sharding.optimizer_parameter(slot) for slot in self.made.slots]
            self._thaw_watch.before_step([each.requires_grad for each in held])
        with self.peers.noting(self.made.context, "train"):
            self._run(play, train=True)
        self.made.sharding.take()
        return self._finish_training(play)

    def evaluate(self, call: StepCall) -> Any:
        """Forward passes only; returns what the user's step returned, joined over micro-batches, on every pipeline rank."""
        play = Play(call, self._cut(call), 1.0, 1.0)
        with self.peers.noting(self.made.context, call.kind):
            self._run(play, train=False)
        if call.real_rows == 0:
            self.router.metrics.rest()  # hooks see one row of padding, as they see a repeated one under DDP
        return self._share(call.kind, (), (), play.joined())[1]

    def run_whole(self, call: StepCall) -> Any:
        """Runs the user's step once on the whole batch, for a module that calls backward itself; shares what it logs."""
        self._cutter.found = call.sample_dims
        rows = float(self._cutter.rows_of(call.batch) if call.real_rows is None else call.real_rows)
        self._last_batch = (call.batch, rows)
        self.router.metrics.begin()
        context, recording = self.made.context, self.router.quick.recording(call.kind)
        watch = context.layers.step(self.cadence.looks_at(call.kind))
        with context.step(), watch, recording, self.router.metrics.watching(rows > 0), call.context():
            context.random.micro_batch(0)
            output = call.function(call.batch, *call.arguments)
        self.router.recorder.commit(rows, rows, counts=rows > 0)
        _, outputs = self.router.share(call.kind, (), (), map_tensors(finished, output))
        return outputs

    def share_of(self, call: StepCall) -> float:
        """This rank's share of the loss of a step: that of its samples, over context-parallel ranks, which share them."""
        layout = self.groups.layout
        known = call.real_rows is not None and bool(call.run_rows)
        samples = call.real_rows / call.run_rows if known else 1.0 / layout.data_parallel_size  # type: ignore[operator]
        return samples / layout.context_parallel_size

    def hand_over(self, gradient_scale: float) -> None:
        """Adds the gradients of the last `train` to the accumulation window; `gradient_scale` is what autograd asks for."""
        self._batches_in_window += 1
        self.made.sharding.hand_over(gradient_scale * self._correction)

    def reduce(self) -> None:
        """The accumulation window ends: sums its gradients over the data-parallel ranks."""
        self._batches_in_window = 0
        self.made.sharding.reduce()
        self.made.sharding.mark_changed()  # they are reduced for a step, which the user's code may make in its own way

    def reduce_early(self) -> None:
        """The next batch ends the window: its gradients go out as they come, where the window holds no others."""
        if not self._batches_in_window:
            self.made.sharding.reduce_early(self._in_one_stage)

    def micro_batch(self) -> int:
        """The micro-batch whose forward pass runs now."""
        return self._now.micro_batch

    def forward_again(self) -> PlayedAgain:
        """Plays the forward passes of the last training step once more, logging and counting nothing; a collective call."""
        if self._last_call is None:
            return PlayedAgain()
        call = replace(self._last_call, kind="validate")
        cut = self._cut(call)
        play = Play(call, Cut(cut.micro_batches, [0] * len(cut.rows)), 1.0, 1.0)
        with torch.no_grad(), uncompiled():
            self._run(play, train=False)
        self.router.recorder.take(), self.router.recorder.take_early()
        rows = [tuple(range(end - count, end)) for end, count in zip(accumulate(cut.rows), cut.rows, strict=True)]
        return PlayedAgain(cut.micro_batches, rows, play.outputs)

    # ------------------------------------------------------------------------------------------------ StageRunner

    def forward(self, stage: int, micro_batch: int, received: Crossing | None) -> Any:
        """Runs the user's step on one micro-batch, as far as `stage` goes."""
        play, context = self._now, self.made.context
        play.micro_batch = micro_batch
        start, stop = self.made.bounds[stage : stage + 2]
        now = StageNow.of(start, stop, stage == self._last_stage, received)
        nothing = () if now.is_last else Crossing.nothing(failed=True)
        if context.is_over(received):
            return nothing
        return context.telling_all(lambda: self._forward(play, now, micro_batch, stage), nothing)

    def _forward(self, play: Play, now: StageNow, micro_batch: int, stage: int) -> Any:
        counts = play.cut.rows[micro_batch] > 0
        router, context = self.router, self.made.context
        context.random.micro_batch(micro_batch)
        try:
            recording, watch = router.quick.recording(play.call.kind), context.layers.step(self.cadence.looks_at(play.call.kind))
            with (
                self._keeping.following(counts),
                recording,
                router.metrics.watching(counts),
                play.call.context(),
                context.play(now),
                watch,
            ):
                output = play.call.function(self._handed(play.cut.micro_batches[micro_batch]), *play.call.arguments)
        except StageOutput as leaving:
            self.made.note_side_values(self.module, stage, None)
            if context.look is not None:
                context.look.metrics_before |= router.recorder.metrics_at_hand
            router.recorder.leave_early(float(play.cut.rows[micro_batch]), counts)
            return leaving.value
        return self._finish_forward(play, output, micro_batch)

    def first_half(self) -> AbstractContextManager[None]:
        return self.made.sharding.first_half()

    def before_weight(self, weight: nn.Parameter) -> None:
        self.made.sharding.before_weight(weight)

    def before_backward(self, stage: int, micro_batch: int) -> None:
        if (stage, micro_batch) in self._last_backwards:
            self.made.sharding.before_last_backward(self.made.stage_slots[stage])

    def after_backward(self, stage: int, micro_batch: int) -> None:
        self.made.sharding.after_backward(self.made.stage_slots[stage])
        if (stage, micro_batch) in self._last_backwards:
            self.made.sharding.after_last_backward(self.made.stage_slots[stage])

    # ---------------------------------------------------------------------------------------------------- details

    @property
    def _now(self) -> Play:
        if self._play is None:
            raise RuntimeError("a stage is played outside of a step")
        return self._play

    @property
    def _gathers_in_passes(self) -> bool:
        """Do data-parallel ranks talk to each other in every pass, so that all must play equally many?"""
        layout = self.groups.layout
        return layout.sharding == "zero3" and layout.data_parallel_size > 1

    def _cut(self, call: StepCall) -> Cut:
        self._cutter.found = call.sample_dims
        most = None
        if self._gathers_in_passes:
            most = self._run_rows.most(call, self._cutter.rows_of(call.batch))
        cut = self._cutter.cut(call.batch, call.real_rows, most)
        self._last_batch = (call.batch, float(cut.num_rows))
        return cut

    def _run(self, play: Play, train: bool) -> None:
        self._play = play
        self.router.metrics.begin()
        signatures = [signature_of(each) for each in play.cut.micro_batches]
        if self._transport is not None and not all(signatures):
            self._transport.forget()  # a batch that shows no tensors: nothing tells its shapes from those of others
            signatures = [each or (index,) for index, each in enumerate(signatures)]
        self._begin(play.call)
        self.made.note_buffers(self.module)
        try:
            table = self.table(len(play.cut.rows), train)
            self._last_backwards = table.last_backwards(self._rank) if train else frozenset()
            with self.made.context.step():
                self.player.play(table, self, signatures)
        finally:
            self._play = None
            self._end(train)
        self.whereabouts.after_cells("the exchange of loss and logged values")

    def enter(self, kind: str) -> None:
        """Hooks between two kinds of steps may have changed parameters."""
        if kind != self._last_kind:
            self._last_kind = kind
            self.made.sharding.mark_changed()

    def _begin(self, call: StepCall) -> None:
        """The module computes with whole parameters from now on."""
        self.enter(call.kind)
        self._keeping.begin()
        self.made.sharding.begin()

    def _end(self, train: bool) -> None:
        self.made.sharding.end()
        if not train:
            self.made.sharding.put_back()

    def _handed(self, micro_batch: Any) -> Any:
        """What the user's step gets, to do with as it likes: it runs on the same samples again for each stage of this rank."""
        if self.groups.layout.stages_per_rank == 1:
            return micro_batch
        return map_tensors(lambda _, tensor: tensor.clone(), micro_batch)

    def _finish_forward(self, play: Play, output: Any, micro_batch: int) -> Any:
        rows = float(play.cut.rows[micro_batch])
        if self.made.context.look is not None:
            self.made.context.look.metrics |= self.router.recorder.metrics_at_hand
            self.made.context.check_results({"its result": output, **self.router.recorder.values_at_hand})
        play.outputs[micro_batch] = map_tensors(finished, output)
        if play.call.kind != "train":
            tokens = token_count(output)
            self.router.recorder.commit(rows, rows if tokens is None else tokens, counts=rows > 0)
            return None
        found = read_loss(output, rows)
        self.made.note_side_values(self.module, self._last_stage, found.loss)
        if micro_batch == 0 and self.cadence.steps == 1:
            warn_of_sum(found.loss, play.cut.rows, self.groups)
        found = found if rows else replace(found, weight=0.0)
        self.router.recorder.commit(rows, found.weight, counts=rows > 0)
        play.losses[micro_batch] = replace(found, loss=found.loss.detach())
        if found.weight == 0.0:
            return self._without_weight(found.loss)
        share = play.loss_scale / self.groups.layout.context_parallel_size  # their gradients are summed, the loss is one
        return found.loss * (found.weight / self._expected(play, found.counts_tokens) * share)

    def _without_weight(self, loss: Tensor) -> Tensor:
        """The loss of samples that do not count; it may be 0/0, so no gradient is made of it where nobody waits for one."""
        return torch.nan_to_num(loss) * 0.0 if self._gathers_in_passes else torch.zeros_like(loss).detach()

    def _expected(self, play: Play, counts_tokens: bool) -> float:
        """The denominator of loss weights, the same on all data-parallel ranks.

        By rows it is exact. Tokens are counted only while the step runs: they are divided by a round number first, and
        gradients are corrected when all tokens are known.
        """
        return play.run_rows * (_TOKENS_PER_ROW if counts_tokens else 1.0)

    def _finish_training(self, play: Play) -> tuple[Tensor, Any]:
        """Shares loss, logs and outputs; sums are the run's weight, its weighted loss, and this rank's denominator."""
        losses = list(play.losses.values())
        zero = torch.zeros((), dtype=torch.float64, device=self.device)
        total = zero + sum(each.weight for each in losses)
        weighted = sum((each.loss.double() * each.weight for each in losses if each.weight), zero)
        counts_tokens = any(each.counts_tokens for each in losses)
        output = play.joined()
        rest = {key: each for key, each in output.items() if key != "loss"} if isinstance(output, Mapping) else None
        apart = self.peers.apart(weighted) if losses else zero
        combined, rest = self._share("train", (total, weighted, apart), (self._expected(play, counts_tokens),), rest)
        run_weight, _, apart_somewhere, expected = combined.sums.tolist()
        self.peers.check(apart_somewhere)
        self._correction = expected / run_weight if run_weight else 1.0
        self.last_loss = (combined.sums[1] / combined.sums[0]).float() if run_weight else combined.sums[1].float()
        return self.last_loss, {"loss": self.last_loss, **rest} if rest is not None else self.last_loss

    def _share(self, kind: str, sums: Sequence[Tensor], own: Sequence[float], output: Any) -> tuple[Combined, Any]:
        """Shares what the step logged, what it returned and, along a pipeline, what it kept on the module."""
        if self._transport is None:
            return self.router.share(kind, sums, own, output)
        kept = self._keeping.kept() if self.holds_last_stage else Kept()
        combined, (output, kept) = self.router.share(kind, sums, own, (output, kept))
        if not self.holds_last_stage:
            self._keeping.put(kept)
        return combined, output
