"""Leaves training when a signal asks for it: the ranks agree between two steps, save once, and end with exit code 75."""

from __future__ import annotations

import signal
from abc import abstractmethod
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_warn

from hybrid_strategy.checkpoint.stop_request import REQUEST
from hybrid_strategy.errors import CheckpointError, ModelError, PreemptedError, message
from hybrid_strategy.strategy import _lightning
from hybrid_strategy.strategy.checkpoint_hooks import CheckpointHooks
from hybrid_strategy.strategy.requeue import requeue
from hybrid_strategy.strategy.step import StepEngine

STOP_NAME = "last-stopped.ckpt"
"""Begins with `last`, so that Lightning's `ckpt_path="last"` finds it."""


class StoppedBySignal(PreemptedError, SystemExit):  # noqa: N818 - it is no failure
    """Leaves `Trainer.fit`. A script that does not catch it ends quietly, with exit code 75.

    Args:
        name: of the signal.
        step: optimizer steps done.
        checkpoint: that of this step; None where nothing was trained, or the Trainer saves no checkpoints.
    """

    def __init__(self, name: str, step: int, checkpoint: Path | None) -> None:
        saved = f"checkpoint: {checkpoint}" if checkpoint else "no checkpoint was to be written"
        super().__init__(f"stopped by {name} after step {step}; {saved}")
        self.code = self.exit_code
        self.name, self.step, self.checkpoint = name, step, checkpoint


_STEP, _SAVE, _CALL = 0, 1, 2


class StepBoundary:
    """Lets all ranks see the same news at the same step: one reduction of 32 bytes on the host each time.

    Saving meets here too, in the same collective: a rank that saves alone meets the next step of the others, and all are told. So
    does a call of the model in a hook, where layers are spread over ranks.
    Making one is collective: its group is its own, so that it never meets anything else.

    Args:
        timeout: how long a rank waits for the others.
    """

    def __init__(self, timeout: timedelta) -> None:
        self._alone = not dist.is_initialized() or dist.get_world_size() == 1
        self._group = None if self._alone else dist.new_group(backend="gloo", timeout=timeout)

    def agree(self, save_failed: bool) -> tuple[int, bool]:
        """The number of the signal that a rank got, or 0, and whether a save has failed somewhere. Collective.

        Raises:
            CheckpointError: on every rank: some of them save at this moment.
        """
        if self._alone:
            return REQUEST.signal_number, save_failed
        return self._meet(_STEP, save_failed)

    def meet_to_go_on(self) -> None:
        """Returns when no rank is about to save. Collective.

        Raises:
            CheckpointError: on every rank: some of them save at this moment.
        """
        if not self._alone:
            self._meet(_STEP, False)

    def meet_to_save(self) -> None:
        """Returns when all ranks are about to save. Collective.

        Raises:
            CheckpointError: on every rank: some of them do not.
        """
        if not self._alone:
            self._meet(_SAVE, False)

    def meet_to_call(self) -> None:
        """Returns when all ranks are about to call the model outside of a step. Collective.

        Raises:
            ModelError: on every rank: some of them do not.
        """
        if not self._alone:
            self._meet(_CALL, False)

    def _meet(self, purpose: int, save_failed: bool) -> tuple[int, bool]:
        news = torch.tensor([REQUEST.signal_number, save_failed, purpose, -purpose], dtype=torch.int64)
        dist.all_reduce(news, op=dist.ReduceOp.MAX, group=self._group)
        number, failed, highest, lowest = news.tolist()
        if highest != -lowest:
            self._tell_who_is_alone(purpose)
        return number, bool(failed)

    def _tell_who_is_alone(self, purpose: int) -> NoReturn:
        purposes: list[int | None] = [None] * dist.get_world_size()
        dist.all_gather_object(purposes, purpose, group=self._group)
        if _CALL in purposes:
            calling = ", ".join(str(rank) for rank, each in enumerate(purposes) if each == _CALL)
            rule = "its layers are spread over ranks, so that all of them must call it"
            advice = "Call it in the hook on every rank, and use what it returns inside the rank-zero block only"
            raise ModelError(message("module", f"called in a hook on rank {calling} only", rule, "", advice))
        saving = ", ".join(str(rank) for rank, each in enumerate(purposes) if each == _SAVE)
        rule, advice = "every rank writes its part", "Call it on every rank, never inside a rank-zero block"
        raise CheckpointError(message("trainer.save_checkpoint", f"called on rank {saving} only", rule, "", advice))


class StopHooks(CheckpointHooks):
    """What the strategy does between two steps. Signals are its own while it trains, or where the process listens anyway."""

    _boundary: StepBoundary | None = None

    def take_signals(self, trainer: pl.Trainer) -> None:
        """To be called by every rank when a run is set up."""
        if trainer.state.fn != TrainerFn.FITTING and not REQUEST.listening:
            _lightning.give_back_signals(trainer)
            self._boundary = self.made.context.outside.meet = None
            return
        if not REQUEST.listening:
            number = self._requeue_signal
            _lightning.take_over_signals(trainer, lambda: REQUEST.listen(*[number] if number else []), REQUEST.ignore)
        else:
            _lightning.take_over_signals(trainer, _nothing, _nothing)
        self._boundary = self._boundary or StepBoundary(self.options.timeout)
        layout = self.groups.layout
        spread = max(layout.tensor_parallel_size, layout.context_parallel_size) > 1
        spread |= layout.sharding == "zero3" and layout.state_shards > 1
        whole = layout.pipeline_parallel_size == 1  # else the first layer of another stage refuses the call on every rank
        self.made.context.outside.meet = self.meet_to_call if spread and whole else None

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Asks, before each batch of training and of validation, whether to go on.

        Raises:
            StoppedBySignal: on every rank, once a checkpoint of this step is complete.
            CheckpointError: on every rank: a checkpoint could not be written in the background.
        """
        if self._boundary is not None:
            self.writer.tidy()
            with self._told_where("the agreement between two steps"):
                number, failed = self._boundary.agree(self.writer.failed)
            if failed:
                self.writer.finish()
            if number:
                self._stop(number)
        return super().batch_to_device(batch, device, dataloader_idx)

    def meet_to_go_on(self) -> None:
        """Before ranks exchange what their hooks have logged: a rank whose hook saves alone does not come to that. Collective."""
        if self._boundary is not None:
            self._boundary.meet_to_go_on()

    def _told_where(self, what: str) -> AbstractContextManager[None]:
        """What this rank does while it waits for others, for the error that ends a wait in vain."""
        return self.engine.whereabouts.doing(what)

    @property
    @abstractmethod
    def engine(self) -> StepEngine:
        """Plays the steps; known after `setup`."""

    @property
    def _requeue_signal(self) -> int | None:
        """The signal after which the job goes back into Slurm's queue, with Lightning's `SLURMEnvironment(auto_requeue=True)`."""
        environment = self.cluster_environment
        if not isinstance(environment, SLURMEnvironment) or not environment.auto_requeue:
            return None
        return environment.requeue_signal or signal.SIGUSR1

    def meet_to_call(self) -> None:
        """Before a hook calls the model. Collective."""
        if self._boundary is not None:
            with self._told_where("a call of the model in a hook"):
                self._boundary.meet_to_call()

    def on_train_end(self) -> None:
        self.meet_to_go_on()
        super().on_train_end()

    def meet_to_save(self) -> None:
        if self._boundary is not None:
            with self._told_where("the meeting before a checkpoint"):
                self._boundary.meet_to_save()

    def _stop(self, number: int) -> NoReturn:
        trainer = self._user_module().trainer
        _lightning.let_children_leave(self.launcher)
        fits = trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking
        requeues = number == self._requeue_signal
        wanted = Path(_lightning.requeue_path(trainer)) if requeues else stop_path(trainer)
        saves = fits and self.trained and (requeues or bool(trainer.checkpoint_callbacks))
        path = self.save_once(wanted, elsewhere=not requeues) if saves else None  # the next job looks for that name
        stop = StoppedBySignal(signal.Signals(number).name, trainer.global_step, path)
        _lightning.rank_zero_info(str(stop))
        if requeues and self.is_global_zero and (problem := requeue()):
            rank_zero_warn(f"The job could not be put back into the queue. {problem}")
        self.barrier("stopped by a signal")  # the first rank that leaves may take the others with it
        raise stop


def _nothing() -> None:
    """The process listens already, and goes on listening after the Trainer."""


def stop_path(trainer: pl.Trainer) -> Path:
    """Where the checkpoint of a stop goes: beside those of the first checkpoint callback."""
    folder = getattr(trainer.checkpoint_callback, "dirpath", None)
    return Path(folder) / STOP_NAME if folder else Path(trainer.default_root_dir) / "checkpoints" / STOP_NAME
