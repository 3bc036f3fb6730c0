"""Optimizer states by the un-split model's parameter names: out of an optimizer, and into one of another layout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hybrid_strategy.checkpoint.loading import SavedTensor
from hybrid_strategy.checkpoint.pieces import Piece, optimizer_key
from hybrid_strategy.errors import CheckpointError, message
from hybrid_strategy.parallel.parameters import Slot

Named = dict[nn.Parameter, Slot]
_GROUP, _MEMBER, _NUMBER = "group", "group_of", "optimizer"


def state_pieces(optimizers: Sequence[Optimizer], named: Named) -> tuple[dict[str, Piece], dict[str, Any]]:
    """The blocks and the replicated values of all optimizers on this rank.

    Raises:
        CheckpointError: a state whose shape is neither the parameter's nor a single number, of a parameter that is split.
    """
    pieces: dict[str, Piece] = {}
    values: dict[str, Any] = {}
    for slot, state in _states(optimizers, named):
        for key, value in state.items():
            full = optimizer_key(slot.name, key)
            if not isinstance(value, Tensor) or (value.numel() == 1 and value.dim() == 0):
                values[full] = value
            elif tuple(value.shape) == slot.shard_spec.sizes:
                pieces[full] = Piece(slot.shard_spec, value)
            elif slot.shard_spec.sizes == slot.shard_spec.full_shape:
                pieces[full] = Piece.whole(full, value, slot.shard_spec.owner)
            else:
                raise CheckpointError(
                    message(
                        f"optimizer state {key} of {slot.name}",
                        tuple(value.shape),
                        "a state of a split parameter must have the shape of its piece",
                        f"the piece is {slot.shard_spec.sizes} of {slot.shard_spec.full_shape}",
                        "Use an optimizer that works element by element, or a layout that does not split this parameter",
                    )
                )
    return pieces, values | _groups(optimizers, named)


def _states(optimizers: Sequence[Optimizer], named: Named) -> Iterator[tuple[Slot, dict[str, Any]]]:
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            if isinstance(parameter, nn.Parameter) and parameter in named:
                yield named[parameter], state


def _groups(optimizers: Sequence[Optimizer], named: Named) -> dict[str, Any]:
    """Hyper-parameters by group number, and the group of every parameter by its name."""
    values: dict[str, Any] = {}
    for number, optimizer in enumerate(optimizers):
        for index, group in enumerate(optimizer.param_groups):
            values[f"{_GROUP}.{number}.{index}"] = {
                key: value for key, value in group.items() if key not in ("params", "param_names")
            }
            for parameter in group["params"]:
                if parameter in named:
                    values[f"{_MEMBER}.{named[parameter].name}"] = [number, index]
    return values


def allocate(optimizers: Sequence[Optimizer], named: Named, saved: Mapping[str, SavedTensor]) -> dict[str, Piece]:
    """Makes empty states for what the checkpoint holds of this rank's parameters; returns the blocks to fill."""
    pieces: dict[str, Piece] = {}
    for optimizer in optimizers:
        for parameter in _parameters(optimizer):
            slot = named.get(parameter)
            if slot is None:
                continue
            prefix = optimizer_key(slot.name, "")
            for key, tensor in saved.items():
                if key.startswith(prefix) and "." not in key[len(prefix) :]:
                    state = key[len(prefix) :]
                    own = tensor.shape == slot.shard_spec.full_shape
                    sizes = slot.shard_spec.sizes if own else tensor.shape
                    value = torch.zeros(sizes, dtype=tensor.dtype, device=parameter.device)
                    optimizer.state[parameter][state] = value
                    pieces[key] = Piece(slot.shard_spec, value) if own else Piece.whole(key, value)
    return pieces


def restore_values(optimizers: Sequence[Optimizer], named: Named, values: Mapping[str, Any]) -> None:
    """Puts step counts and hyper-parameters back, matched by parameter name."""
    for optimizer in optimizers:
        for parameter in _parameters(optimizer):
            slot = named.get(parameter)
            if slot is None:
                continue
            prefix = optimizer_key(slot.name, "")
            for key, value in values.items():
                if key.startswith(prefix):
                    optimizer.state[parameter][key[len(prefix) :]] = value.clone() if isinstance(value, Tensor) else value
    _restore_groups(optimizers, named, values)


def _restore_groups(optimizers: Sequence[Optimizer], named: Named, values: Mapping[str, Any]) -> None:
    for number, optimizer in enumerate(optimizers):
        for index, group in enumerate(optimizer.param_groups):
            member = next((named[each].name for each in group["params"] if each in named), None)
            place = values.get(f"{_MEMBER}.{member}", [number, index])
            group.update(values.get(f"{_GROUP}.{place[0]}.{place[1]}", {}))


def _parameters(optimizer: Optimizer) -> Iterator[nn.Parameter]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])
