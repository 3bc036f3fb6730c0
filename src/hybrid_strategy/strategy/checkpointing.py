"""What the strategy saves and loads: this rank's pieces, Lightning's own state, random states, the data position."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from torch import Tensor, nn
from torch.optim import Optimizer

from hybrid_strategy.checkpoint.certificate import Certificate
from hybrid_strategy.checkpoint.content import CheckpointContent
from hybrid_strategy.checkpoint.loading import LoadOptions, load_checkpoint, saved_names
from hybrid_strategy.checkpoint.pieces import Piece, model_key, section
from hybrid_strategy.distributed.groups import Groups
from hybrid_strategy.parallel.parameters import Slot
from hybrid_strategy.parallelize import Parallelized
from hybrid_strategy.strategy.averages import TRAINED, ShardedAverage, trained_key
from hybrid_strategy.strategy.data_position import present_position, without_loader_state
from hybrid_strategy.strategy.optimizer_states import allocate, restore_values, state_pieces
from hybrid_strategy.strategy.random_state import coordinate_key, put_random_state, take_random_state

_POSITION = "hybrid_strategy_data_position"


@dataclass
class Loaded:
    """What a load brought: Lightning's own state, where the data goes on, and the account of it."""

    state: dict[str, Any]
    position: dict[str, Any] | None
    certificate: Certificate


@dataclass
class StateKeeper:
    """Gathers and fills the state of one rank. Where there is an average of the weights, it is saved as the model's weights."""

    module: pl.LightningModule
    made: Parallelized
    groups: Groups
    optimizers: list[Optimizer] = field(default_factory=list)
    average: ShardedAverage | None = None

    def weight_pieces(self) -> dict[str, Piece]:
        """Weights and persistent buffers of this rank, by key."""
        sharding = self.made.sharding
        pieces = {
            model_key(slot.name): Piece(slot.shard_spec, sharding.optimizer_parameter(slot).data) for slot in self.made.slots
        }
        owner = self.groups.is_first_replica and self.groups.coordinate.tensor_parallel == 0
        for name, buffer in _persistent_buffers(self.module):
            pieces[model_key(name)] = Piece.whole(name, buffer, owner)
        return pieces

    def _all_weight_pieces(self) -> dict[str, Piece]:
        """Weights and buffers; with an average, the weights in training go to a section of their own."""
        pieces = self.weight_pieces()
        if self.average is None:
            return pieces
        trained = {trained_key(slot.name): pieces[model_key(slot.name)] for slot in self.made.slots}
        return {**pieces, **trained, **self.average.pieces()}

    def named_parameters(self) -> dict[nn.Parameter, Slot]:
        """The slot of each parameter that an optimizer may hold."""
        sharding = self.made.sharding
        return {sharding.optimizer_parameter(slot): slot for slot in self.made.slots}

    def content(self, checkpoint: dict[str, Any]) -> CheckpointContent:
        """All that this rank gives to a checkpoint; `checkpoint` is what Lightning wants saved."""
        state = {key: value for key, value in checkpoint.items() if key not in ("state_dict", "optimizer_states")}
        position = present_position(self.module.trainer)
        if position is not None:
            state = without_loader_state(state)
        tensors, replicated = self._all_weight_pieces(), dict[str, Any]()
        if "optimizer_states" in checkpoint:
            pieces, replicated = state_pieces(self.optimizers, self.named_parameters())
            tensors.update(pieces)
        return CheckpointContent(
            tensors=tensors,
            replicated=replicated,
            random_state={coordinate_key(self.groups.coordinate): take_random_state()},
            state={**state, _POSITION: position},
            plan={"layout": vars(self.groups.layout)},
            meta={"global_step": int(checkpoint.get("global_step", 0)), "epoch": int(checkpoint.get("epoch", 0))},
        )

    def load(self, path: Path) -> Loaded:
        """Fills weights and optimizer states from a checkpoint of any layout."""
        named = self.named_parameters()
        saved = saved_names(path)
        averaged = any(section(key) == TRAINED for key in saved)
        weights = self._all_weight_pieces() if averaged else self.weight_pieces()
        tensors = {**weights, **allocate(self.optimizers, named, saved)}
        loaded = load_checkpoint(path, tensors, LoadOptions(strict=self.module.strict_loading))
        restore_values(self.optimizers, named, loaded.small.replicated)
        self.made.sharding.mark_changed()
        if self.average is not None and not averaged:
            self.average.begin_with_weights()
        own = loaded.small.random_state.get(coordinate_key(self.groups.coordinate))
        if own is not None:
            put_random_state(own)
        state = dict(loaded.small.state)
        position = state.pop(_POSITION, None)
        state = {**state, "state_dict": {}, "optimizer_states": [{} for _ in self.optimizers]}
        return Loaded(state, position, loaded.certificate)


def _persistent_buffers(module: nn.Module) -> Sequence[tuple[str, Tensor]]:
    def found() -> Iterator[tuple[str, Tensor]]:
        for prefix, each in module.named_modules():
            for name, buffer in each._buffers.items():
                if buffer is not None and name not in each._non_persistent_buffers_set:
                    yield (f"{prefix}.{name}" if prefix else name), buffer

    return list(found())
