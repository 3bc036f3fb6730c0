"""The strategy's part in saving and loading: what Lightning calls for a checkpoint, and when training starts from one."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.optim import Optimizer

from hybrid_strategy.checkpoint.folder import refuse_url
from hybrid_strategy.checkpoint.saving import SaveOptions
from hybrid_strategy.checkpoint.search import instead_of
from hybrid_strategy.data.position import MeshPosition
from hybrid_strategy.errors import CheckpointError, message
from hybrid_strategy.parallelize import Parallelized
from hybrid_strategy.strategy import _lightning
from hybrid_strategy.strategy._lightning_loops import (
    is_at_window_start,
    put_logged_values,
    settle,
    standing_of,
    train_loaders,
)
from hybrid_strategy.strategy.averages import ShardedAverage
from hybrid_strategy.strategy.checkpoint_writer import CheckpointWriter
from hybrid_strategy.strategy.checkpointing import Loaded, StateKeeper
from hybrid_strategy.strategy.data_position import Resumption
from hybrid_strategy.strategy.options import Options
from hybrid_strategy.strategy.random_state import TakenRandomState, restore_random_state
from hybrid_strategy.strategy.several_loaders import warn_of_uneven_shares
from hybrid_strategy.strategy.world import WorldStrategy

_AFTER_AN_ERROR = 30.0
"""Seconds that a save waits for the other ranks when an error has interrupted this one: they may never come."""


class CheckpointHooks(WorldStrategy):
    """Saves and loads folders that any layout can load; goes on from them exactly."""

    _loaded: Loaded | None = None
    _edited: Loaded | None = None
    _resumption: Resumption | None = None
    _window_state: TakenRandomState | None = None
    _given: Mapping[str, Any] = MappingProxyType({})
    _last_save: tuple[Path, int] | None = None
    _first_batches: int = 0
    _writer: CheckpointWriter | None = None
    _average: ShardedAverage | None = None
    options: Options

    @property
    @abstractmethod
    def made(self) -> Parallelized:
        """What `parallelize` made of the module."""

    # ------------------------------------------------------------------------------------------------- state dicts

    @property
    def lightning_restore_optimizer(self) -> bool:
        """Optimizer states are loaded by `load_checkpoint`, straight into this rank's pieces."""
        return False

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """This rank's pieces by the un-split model's names; less and more what the module's own `state_dict` says."""
        self._given = self._keeper().given_state()
        return dict(self._given)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Nothing: `save_checkpoint` takes the states itself, by parameter name."""
        return {}

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Nothing, unless the module looks at what it loads: else `load_checkpoint` has filled the weights already.

        Raises:
            CheckpointError: on every rank: what the module left of it are not its weights.
        """
        if self._edited is not None:
            loaded, self._edited = self._edited, None
            certificate = self._keeper().load_edited(loaded, checkpoint["state_dict"])
            _lightning.rank_zero_info("\n".join(certificate.lines()))

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Nothing: `load_checkpoint` has filled the states already."""

    # ------------------------------------------------------------------------------------------------------- files

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        """Writes a checkpoint folder that any layout can load; a collective call.

        Raises:
            CheckpointError: on every rank, if any rank could not write its part.
        """
        if storage_options is not None:
            rule = "the folder is written by all ranks, without a CheckpointIO"
            raise CheckpointError(message("storage_options", type(storage_options).__name__, rule, "", "Leave it out"))
        refuse_url("checkpoint", str(filepath))
        trainer = self._user_module().trainer
        interrupted = trainer.state.status == TrainerStatus.INTERRUPTED
        if not interrupted:
            self.meet_to_save()
        path = Path(self.broadcast(str(filepath))).expanduser()
        options = SaveOptions(arrival_seconds=_AFTER_AN_ERROR) if interrupted else SaveOptions()
        given, self._given = self._given, {}
        written = self.writer.save(path, self._keeper().content(checkpoint, given, self._window_state), options)
        if "optimizer_states" in checkpoint and written:
            self._last_save = path, standing_of(trainer).total_batches

    def meet_to_save(self) -> None:
        """Returns when all ranks are about to save; where they may do something else meanwhile, they are told. Collective.

        Raises:
            CheckpointError: on every rank: some of them do not save.
        """

    def save_once(self, path: Path, elsewhere: bool = True) -> Path:
        """Writes a checkpoint of the present step, unless there is one, and waits until it is complete. Collective.

        Args:
            elsewhere: one of this step under another name will do.

        Returns:
            The checkpoint of this step.

        Raises:
            CheckpointError: on every rank, if it could not be written.
        """
        trainer = self._user_module().trainer
        known = self._last_save
        there = known is not None and known[1] == standing_of(trainer).total_batches and elsewhere
        self.writer.finish()
        if known is not None and self.broadcast(there and known[0].is_dir()):
            return known[0]
        trainer.save_checkpoint(path)
        self.writer.finish()
        if self.writer.error is not None:
            raise self.writer.error
        return path

    def save_if_trained(self, path: Path) -> Path | None:
        """`save_once`, where a batch has been finished since training started or went on. Collective.

        Returns:
            The checkpoint of this step; None where there is none because nothing was trained, or it failed and the run goes on.

        Raises:
            CheckpointError: on every rank, if it could not be written (`checkpoint_error="raise"`).
        """
        if not self.trained:
            return None
        try:
            return self.save_once(path)
        except CheckpointError:
            if self.options.checkpoint_error == "raise":
                raise
            return None  # the writer has said so

    @property
    def trained(self) -> bool:
        """Has a batch been finished since training started or went on?"""
        return standing_of(self._user_module().trainer).total_batches != self._first_batches

    @property
    def writer(self) -> CheckpointWriter:
        """Writes the checkpoints of this strategy."""
        if self._writer is None:
            options = self.options
            how = options.asynchronous_checkpoint, options.checkpoint_when_busy, options.checkpoint_error
            self._writer = CheckpointWriter(*how, self.is_global_zero)
        return self._writer

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Fills weights and optimizer states from a checkpoint of any layout; returns Lightning's own state.

        Raises:
            CheckpointError: on every rank: it is damaged, of another model, or holds too little.
        """
        schedulers = [each.scheduler for each in self.lr_scheduler_configs]
        path = Path(self.broadcast(str(checkpoint_path))).expanduser()
        try:
            loaded = self._keeper().load(path, schedulers)
        except CheckpointError as error:
            raise CheckpointError(f"{error}{self._offer(path)}") from error
        if self._user_module().trainer.state.fn == TrainerFn.FITTING:
            self._loaded = loaded
            self._resumption = Resumption(loaded.standing, loaded.positions) if loaded.standing is not None else None
        if loaded.weights is None:
            _lightning.rank_zero_info("\n".join(loaded.certificate.lines()))
        else:
            self._edited = loaded
        return loaded.state

    def _offer(self, path: Path) -> str:
        """Where `path` is damaged: the newest checkpoint beside it that is not. Collective."""
        return str(self.broadcast(instead_of(path) if self.is_global_zero else ""))

    def finish_checkpoints(self) -> None:
        """Completes what is being written; nothing more is saved before the next run is set up. Collective.

        Raises:
            CheckpointError: on every rank: it could not be written (`checkpoint_error="raise"`). Where an exception ends the run
                anyway that is a warning.
        """
        if self._writer is not None:
            writer, self._writer = self._writer, None
            try:
                writer.close()
            except CheckpointError as error:
                if self._user_module().trainer.state.status != TrainerStatus.INTERRUPTED:
                    raise
                rank_zero_warn(str(error))  # what has ended the run is what must be seen, and what its exit code comes from

    def remove_checkpoint(self, filepath: str | Path) -> None:
        self.writer.remove(Path(filepath).expanduser())

    # ----------------------------------------------------------------------------------------------------- resuming

    def place_data(self, mesh: MeshPosition) -> None:
        """Puts a loader that is about to be iterated where the loaded checkpoint stood.

        Here and not later: Lightning makes the iterator, which reads ahead, right after it has processed the loader.
        """
        trainer = self._user_module().trainer
        if self._resumption is not None and trainer.training:
            self._resumption.place(trainer, mesh)

    def on_train_start(self) -> None:
        """The last thing before the first batch: whatever draws random numbers or moves counters before it does no harm."""
        loaded, resumption = self._loaded, self._resumption
        self._loaded = self._resumption = None
        trainer = self._user_module().trainer
        if loaded is not None:
            self._go_on(trainer, loaded, resumption)
        self._first_batches = standing_of(trainer).total_batches
        warn_of_uneven_shares(train_loaders(trainer))

    def _go_on(self, trainer: pl.Trainer, loaded: Loaded, resumption: Resumption | None) -> None:
        put_logged_values(trainer, loaded.logged)
        if resumption is not None:
            settle(trainer, resumption.standing)
            resumption.tell_of_other_loaders(trainer)
        restore_random_state(self.groups.coordinate, loaded.random_state)

    def on_train_end(self) -> None:
        self.writer.finish()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Keeps the random state that an interrupted window of accumulated batches is done again with."""
        if is_at_window_start(self._user_module().trainer):
            self._window_state = TakenRandomState()

    def _keeper(self) -> StateKeeper:
        return StateKeeper(self._user_module(), self.made, self.groups, self.optimizers, self._average)
