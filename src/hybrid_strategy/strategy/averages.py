"""Weight averages of a sharded model: each rank averages its own pieces, element by element, with the callback's own rule."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import WeightAveraging
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from hybrid_strategy.checkpoint.pieces import Piece, model_key
from hybrid_strategy.parallelize import Parallelized
from hybrid_strategy.strategy.own_states import persistent_buffers


class _Pieces(nn.Module):
    """Copies of what the optimizer holds of a module on this rank, in the module's order."""

    def __init__(self, module: pl.LightningModule) -> None:
        super().__init__()
        self.values = nn.ParameterList(nn.Parameter(each.detach().clone(), requires_grad=False) for each in module.parameters())
        for index, buffer in enumerate(module.buffers()):
            self.register_buffer(f"buffer_{index}", buffer.detach().clone())


class ShardedAverage:
    """Lets a `WeightAveraging` callback average, swap, save and restore this rank's pieces.

    Args:
        callback: the user's callback.
        module: the parallelised module.
        made: whose pieces they are.
    """

    def __init__(self, callback: WeightAveraging, module: pl.LightningModule, made: Parallelized) -> None:
        self._callback, self._module, self._made = callback, module, made
        options = dict(callback._kwargs)
        average = AveragedModel(_Pieces(module), device=callback._device, use_buffers=callback._use_buffers, **options)
        callback._average_model = average
        self._average = average
        self.swapped = False
        """The module holds the average, and this the weights in training: during a validation."""
        for name in ("_swap_models", "_copy_average_to_current"):
            vars(callback)[name] = self._with_notice(name)
        vars(callback)["on_save_checkpoint"] = self._save
        vars(callback)["on_load_checkpoint"] = self._load

    def pieces(self) -> dict[str, Piece]:
        """What this holds of weights and persistent buffers, under the keys of what it stands for."""
        held = {id(each): value for each, value in self._pairs()}
        sharding, found = self._made.sharding, dict[str, Piece]()
        for slot in self._made.slots:
            found[model_key(slot.name)] = Piece(slot.shard_spec, held[id(sharding.optimizer_parameter(slot))].data)
        for name, buffer in persistent_buffers(self._module):
            if id(buffer) in held:  # else it has come since
                found[model_key(name)] = Piece.whole(name, held[id(buffer)])
        return found

    def _pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Everything of the module with what this holds for it."""
        return zip(
            (*self._module.parameters(), *self._module.buffers()),
            (*self._average.module.parameters(), *self._average.module.buffers()),
            strict=True,
        )

    def begin_with_weights(self) -> None:
        """The average is that of the weights as they are: the checkpoint had none."""
        for weight, average in self._pairs():
            average.data.copy_(weight.data)

    def _with_notice(self, name: str) -> Any:
        method = getattr(type(self._callback), name)

        def changed(module: pl.LightningModule) -> None:
            method(self._callback, module)
            self.swapped ^= name == "_swap_models"
            self._made.sharding.mark_changed()

        return changed

    def _save(self, trainer: pl.Trainer, module: pl.LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint["averaging_state"] = {"n_averaged": int(self._average.n_averaged)}

    def _load(self, trainer: pl.Trainer, module: pl.LightningModule, checkpoint: dict[str, Any]) -> None:
        if "averaging_state" in checkpoint:
            self._average.n_averaged.fill_(int(checkpoint["averaging_state"]["n_averaged"]))
