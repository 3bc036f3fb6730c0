"""Lightning's checkpoint calls, answered with the folder of `hybrid_strategy.checkpoint`: any layout loads into any other."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.optim import Optimizer

from hybrid_strategy.checkpoint.content import CheckpointContent
from hybrid_strategy.checkpoint.folder import remove_checkpoint
from hybrid_strategy.checkpoint.loading import LoadOptions, load_checkpoint, saved_names
from hybrid_strategy.checkpoint.pieces import Piece, model_key
from hybrid_strategy.checkpoint.saving import save_checkpoint
from hybrid_strategy.errors import CheckpointError, message
from hybrid_strategy.parallel.parameters import Slot
from hybrid_strategy.strategy.optimizer_states import allocate, restore_values, state_pieces
from hybrid_strategy.strategy.random_state import coordinate_key, put_random_state, take_random_state

if TYPE_CHECKING:
    from hybrid_strategy.strategy.hybrid import HybridParallelStrategy

_log = logging.getLogger(__name__)
_POSITION = "hybrid_strategy_data_position"


class CheckpointMixin:
    """The part of the strategy that saves and loads."""

    optimizers: list[Optimizer]
    _resume_position: dict[str, Any] | None = None

    @property
    def lightning_restore_optimizer(self) -> bool:
        """States are loaded by `load_checkpoint`, straight into this rank's pieces."""
        return False

    def lightning_module_state_dict(self: HybridParallelStrategy) -> dict[str, Any]:
        """This rank's pieces by the un-split model's names."""
        return {key: piece.tensor for key, piece in self._weight_pieces().items()}

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Nothing: `save_checkpoint` takes the states itself, by parameter name."""
        return {}

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Nothing: `load_checkpoint` has filled the weights already."""

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Nothing: `load_checkpoint` has filled the states already."""

    def save_checkpoint(
        self: HybridParallelStrategy, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None
    ) -> None:
        """Writes a checkpoint folder; a collective call.

        Raises:
            CheckpointError: on every rank, if any rank could not write its part.
        """
        if storage_options is not None:
            raise CheckpointError(
                message(
                    "storage_options", type(storage_options).__name__, "the folder is written by all ranks", "", "Leave it out"
                )
            )
        path = Path(self.broadcast(str(filepath)))
        tensors: dict[str, Piece] = dict(self._weight_pieces())
        checkpoint.pop("state_dict", None)
        replicated: dict[str, Any] = {}
        if checkpoint.pop("optimizer_states", None) is not None:
            pieces, replicated = state_pieces(self.optimizers, self._named_parameters())
            tensors.update(pieces)
        position = self._data_position()
        content = CheckpointContent(
            tensors=tensors,
            replicated=replicated,
            random_state={coordinate_key(self.groups.coordinate): take_random_state()},
            state={**checkpoint, _POSITION: position},
            plan={"layout": vars(self.layout)},
            meta={"global_step": int(checkpoint.get("global_step", 0)), "epoch": int(checkpoint.get("epoch", 0))},
        )
        if path.is_file() and self.is_global_zero:
            path.unlink()
        save_checkpoint(path, content)

    def load_checkpoint(
        self: HybridParallelStrategy, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Fills weights and optimizer states from a checkpoint of any layout and returns Lightning's own state."""
        path = Path(self.broadcast(str(checkpoint_path)))
        module = self._user_module()
        tensors: dict[str, Piece] = dict(self._weight_pieces())
        tensors.update(allocate(self.optimizers, self._named_parameters(), saved_names(path)))
        loaded = load_checkpoint(path, tensors, LoadOptions(strict=module.strict_loading))
        restore_values(self.optimizers, self._named_parameters(), loaded.small.replicated)
        self.made.sharding.mark_changed()
        own = loaded.small.random_state.get(coordinate_key(self.groups.coordinate))
        if own is not None:
            put_random_state(own)
        state = dict(loaded.small.state)
        self._resume_position = state.pop(_POSITION, None)
        rank_zero_info("\n".join(loaded.certificate.lines()))
        return {**state, "state_dict": {}, "optimizer_states": [{} for _ in self.optimizers]}

    def remove_checkpoint(self: HybridParallelStrategy, filepath: str | Path) -> None:
        if self.is_global_zero:
            remove_checkpoint(Path(filepath))

    def on_train_start(self: HybridParallelStrategy) -> None:
        """The loader goes on with the first sample that the saved run had not consumed."""
        position, self._resume_position = self._resume_position, None
        mesh = self._train_position()
        if position is not None and mesh is not None:
            mesh.load_state_dict(position)

    def _train_position(self: HybridParallelStrategy) -> Any:
        loader = self._user_module().trainer.train_dataloader
        return getattr(loader, "mesh", None)

    def _data_position(self: HybridParallelStrategy) -> dict[str, int] | None:
        trainer = self._user_module().trainer
        mesh = self._train_position()
        if mesh is None or not trainer.training:
            return None
        done = trainer.fit_loop.epoch_loop.batch_progress.current.ready
        position: dict[str, int] = mesh.state_dict(done)
        return position

    def _named_parameters(self: HybridParallelStrategy) -> dict[nn.Parameter, Slot]:
        sharding = self.made.sharding
        return {sharding.optimizer_parameter(slot): slot for slot in self.made.slots}

    def _weight_pieces(self: HybridParallelStrategy) -> dict[str, Piece]:
        """Weights and persistent buffers of this rank, by key."""
        sharding = self.made.sharding
        pieces = {
            model_key(slot.name): Piece(slot.shard_spec, sharding.optimizer_parameter(slot).data) for slot in self.made.slots
        }
        coordinate = self.groups.coordinate
        owner = coordinate.data_parallel == 0 and coordinate.tensor_parallel == 0
        for name, buffer in _persistent_buffers(self._user_module()):
            pieces[model_key(name)] = Piece.whole(name, buffer, owner)
        return pieces


def _persistent_buffers(module: nn.Module) -> Sequence[tuple[str, Tensor]]:
    found: list[tuple[str, Tensor]] = []
    for prefix, each in module.named_modules():
        for name, buffer in each._buffers.items():
            if isinstance(buffer, torch.Tensor) and name not in each._non_persistent_buffers_set:
                found.append((f"{prefix}.{name}" if prefix else name, buffer))
    return found
