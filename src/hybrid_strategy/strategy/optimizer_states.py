"""Optimizer states by the un-split model's parameter names: out of an optimizer, and into one of another layout."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hybrid_strategy.checkpoint.encoding import same
from hybrid_strategy.checkpoint.loading import SavedTensor
from hybrid_strategy.checkpoint.pieces import OPTIMIZER, Piece, key_path, optimizer_key, section
from hybrid_strategy.errors import CheckpointError, message
from hybrid_strategy.parallel.parameters import Slot

Named = dict[nn.Parameter, Slot]
_SETTINGS = "settings"
_NOT_SETTINGS = ("params", "param_names")


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
    return pieces, values | _settings(optimizers, named)


def _states(optimizers: Sequence[Optimizer], named: Named) -> Iterator[tuple[Slot, dict[str, Any]]]:
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            if isinstance(parameter, nn.Parameter) and parameter in named:
                yield named[parameter], state


def _settings(optimizers: Sequence[Optimizer], named: Named) -> dict[str, Any]:
    """The hyper-parameters of every parameter: those of its group. A group's number means other groups on other ranks."""
    values: dict[str, Any] = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            settings = _settings_of(group)
            values |= {f"{_SETTINGS}.{named[each].name}": settings for each in group["params"] if each in named}
    return values


def allocate(optimizers: Sequence[Optimizer], named: Named, saved: Mapping[str, SavedTensor]) -> dict[str, Piece]:
    """Makes empty states for what the checkpoint holds of this rank's parameters; returns the blocks to fill."""
    pieces: dict[str, Piece] = {}
    by_name = _by_name(saved)
    for optimizer in optimizers:
        for _, parameter in _members(optimizer, named):
            spec = named[parameter].shard_spec
            for state, tensor in by_name.get(named[parameter].name, {}).items():
                key = optimizer_key(named[parameter].name, state)
                own = tensor.shape == spec.full_shape
                value = torch.zeros(spec.sizes if own else tensor.shape, dtype=tensor.dtype, device=parameter.device)
                optimizer.state[parameter][state] = value
                pieces[key] = Piece(spec, value) if own else Piece.whole(key, value)
    return pieces


def restore_values(optimizers: Sequence[Optimizer], named: Named, values: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Puts step counts and hyper-parameters back, matched by parameter name.

    Returns:
        (what, why) of settings that could not be put back.
    """
    by_name = _by_name(values)
    for optimizer in optimizers:
        for group, parameter in _members(optimizer, named):
            device = parameter.device if group.get("capturable") or group.get("fused") else "cpu"
            for state, value in by_name.get(named[parameter].name, {}).items():
                optimizer.state[parameter][state] = value.clone().to(device) if isinstance(value, Tensor) else value
    groups = (group for optimizer in optimizers for group in optimizer.param_groups)
    return [line for group in groups for line in _restore_group(group, named, values)]


def group_settings(optimizers: Sequence[Optimizer]) -> list[list[dict[str, Any]]]:
    """The hyper-parameters of every group of every optimizer, in order, also of groups without a parameter on this rank."""
    return [[_settings_of(group) for group in optimizer.param_groups] for optimizer in optimizers]


def restore_empty_groups(optimizers: Sequence[Optimizer], named: Named, saved: Sequence[Sequence[Mapping[str, Any]]]) -> None:
    """Gives groups without a parameter on this rank the settings that the group in their place had: their rate is logged too."""
    for optimizer, groups in zip(optimizers, saved, strict=False):
        if len(groups) != len(optimizer.param_groups):
            continue
        for group, settings in zip(optimizer.param_groups, groups, strict=True):
            if not any(each in named for each in group["params"]):
                group.update(settings)


def _settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: each for key, each in group.items() if key not in _NOT_SETTINGS}


def _by_name(values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """`optimizer.<name>.<state>` -> value, as name -> state -> value."""
    found: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        if section(key) == OPTIMIZER:
            _, name, state = key_path(key)
            found.setdefault(name, {})[state] = value
    return found


def _restore_group(group: dict[str, Any], named: Named, values: Mapping[str, Any]) -> list[tuple[str, str]]:
    names = [named[each].name for each in group["params"] if each in named]
    known = {name: values[f"{_SETTINGS}.{name}"] for name in names if f"{_SETTINGS}.{name}" in values}
    if not known:
        return []
    first, *others = known
    for other in others:
        if not same(known[first], known[other]):
            return [(f"settings of the group of {first}", f"{other}, which is in the same group here, had others")]
    group.update({key: value.clone() if isinstance(value, Tensor) else value for key, value in known[first].items()})
    return []


def new_parameters(optimizers: Sequence[Optimizer], named: Named, values: Mapping[str, Any]) -> list[str]:
    """Parameters that an optimizer has here and had not in the saved run: their states start anew."""
    names = (named[each].name for optimizer in optimizers for _, each in _members(optimizer, named))
    return [name for name in names if f"{_SETTINGS}.{name}" not in values]


def fit_to_groups(state: Mapping[str, Any], scheduler: Any) -> dict[str, Any]:
    """The state of a learning-rate scheduler with rank 0's numbers for each of its groups replaced by those of this rank's.

    Ranks of a pipeline hold other groups, in number and order; `initial_lr` and `lr` came back with the groups, by name.
    """
    groups, fitted = scheduler.optimizer.param_groups, dict(state)
    for key, value in state.items():
        own = getattr(scheduler, key, None)
        if key == "_schedulers" and isinstance(own, list) and len(own) == len(value):
            fitted[key] = [fit_to_groups(*pair) for pair in zip(value, own, strict=True)]
        elif key in ("base_lrs", "_last_lr"):
            setting = "initial_lr" if key == "base_lrs" else "lr"
            fitted[key] = [group.get(setting, group["lr"]) for group in groups]
        elif isinstance(value, list) and isinstance(own, list) and len(own) != len(value):
            fitted[key] = own
        elif isinstance(own, Counter):  # MultiStepLR: it was saved as a plain dict
            fitted[key] = Counter(value)
    return fitted


def _members(optimizer: Optimizer, named: Named) -> Iterator[tuple[dict[str, Any], nn.Parameter]]:
    """Every parameter that has a name, with its group."""
    return ((group, each) for group in optimizer.param_groups for each in group["params"] if each in named)
