"""Weights of a checkpoint in the hands of the module: `on_load_checkpoint` and `load_state_dict` see whole tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning_utilities.core.overrides import is_overridden
from torch import Tensor, nn

from hybrid_strategy.checkpoint.certificate import Certificate
from hybrid_strategy.checkpoint.loading import LoadOptions, load_checkpoint, read_whole, refuse_weights, saved_names
from hybrid_strategy.checkpoint.pieces import MODEL, Piece, section
from hybrid_strategy.errors import CheckpointError, message
from hybrid_strategy.strategy.own_states import further_names, persistent_states

_UNREAD = object()
_MISSING = object()


class SavedWeights(dict[str, Any]):
    """The state dict of a checkpoint; a tensor is read, whole and on the host, when it is looked at.

    Args:
        folder: of the checkpoint.
        others: entries that are no tensors of their own.
    """

    def __init__(self, folder: Path, others: Mapping[str, Any]) -> None:
        names = [key.partition(".")[2] for key in saved_names(folder) if section(key) == MODEL]
        super().__init__({**dict.fromkeys(names, _UNREAD), **others})
        self._folder = folder

    def unread(self) -> set[str]:
        """Names of tensors that nobody has looked at."""
        return {name for name in self if dict.__getitem__(self, name) is _UNREAD}

    def __iter__(self) -> Iterator[str]:  # also keeps `dict(...)` from copying what has not been read
        return super().__iter__()

    def __getitem__(self, name: str) -> Any:
        value = super().__getitem__(name)
        if value is _UNREAD:
            value = read_whole(self._folder, f"{MODEL}.{name}")
            super().__setitem__(name, value)
        return value

    def get(self, name: str, default: Any = None) -> Any:
        try:
            return self[name]
        except KeyError:
            return default

    def pop(self, name: str, default: Any = _MISSING) -> Any:
        if name not in self and default is not _MISSING:
            return default
        value = self[name]
        del self[name]
        return value

    def popitem(self) -> tuple[str, Any]:
        name = next(reversed(self.keys()))
        return name, self.pop(name)

    def setdefault(self, name: str, default: Any = None) -> Any:
        if name not in self:
            self[name] = default
        return self[name]

    def values(self) -> Any:
        return [self[name] for name in self]

    def items(self) -> Any:
        return [(name, self[name]) for name in self]

    def copy(self) -> dict[str, Any]:
        return dict(self.items())


def looks_at_weights(module: pl.LightningModule) -> bool:
    """The module has something to say about what it loads."""
    return is_overridden("on_load_checkpoint", module, pl.LightningModule) or _has_own_load(module)


def _has_own_load(module: nn.Module) -> bool:
    """`load_state_dict` is the module's own."""
    return type(module).load_state_dict is not nn.Module.load_state_dict


def fill(
    module: pl.LightningModule,
    pieces: Mapping[str, Piece],
    state: Mapping[str, Any],
    certificate: Certificate,
    shared: Callable[[list[str]], list[str]],
) -> Certificate:
    """Fills this rank's pieces from a state dict that hooks have edited; collective.

    Args:
        pieces: by name.
        certificate: of what has been loaded so far.
        shared: what all ranks together have in their lists.

    Raises:
        CheckpointError: on every rank: a weight is missing or has no place, or has another shape.
    """
    needed, known = set(shared(list(pieces))), {*further_names(module), *persistent_states(module)}
    path, own = Path(certificate.checkpoint), _has_own_load(module)
    if own:
        try:
            state = _left_by_module(module, state, needed, known)
        except RuntimeError as error:
            raise CheckpointError(message("checkpoint", str(path), "load_state_dict refuses it", str(error), "")) from error
    absent = sorted(needed - state.keys())
    surplus = shared(sorted(each for each in state.keys() - needed - known if not each.endswith("_extra_state")))
    if module.strict_loading and not own:
        refuse_weights(path, absent, surplus)
    unread = state.unread() if isinstance(state, SavedWeights) else set[str]()
    read = {name: piece for name, piece in pieces.items() if name in state.keys() - unread}
    problems = shared(_misfits(read, state))
    if problems:
        rule = "an entry has another shape than the model's"
        raise CheckpointError(message("state_dict", str(path), rule, "; ".join(problems), "Let on_load_checkpoint make it fit"))
    with torch.no_grad():
        for name, piece in read.items():
            piece.tensor.copy_(state[name][piece.spec.slices])
    if isinstance(state, SavedWeights):
        straight = {f"{MODEL}.{name}": pieces[name] for name in pieces.keys() & unread}
        load_checkpoint(path, straight, LoadOptions(digests=False, strict=False))
    found = certificate.with_restored(MODEL, f"{len(needed & state.keys())} tensors")
    return replace(found, missing=(*found.missing, *absent), unexpected=(*found.unexpected, *surplus))


def _left_by_module(module: pl.LightningModule, state: Mapping[str, Any], needed: set[str], known: set[str]) -> dict[str, Any]:
    """What the module's own `load_state_dict` hands to torch's.

    Args:
        needed: names of all weights and buffers of the un-split model.
        known: further names that have a place.

    Raises:
        RuntimeError: torch's own, where the module asks it to be strict.
    """
    found: dict[str, Any] = {}

    def before(_: nn.Module, handed: dict[str, Any], *others: Any) -> None:
        found.update(handed)
        handed.clear()  # it is placed by us: what torch has before it are pieces

    def after(_: nn.Module, keys: Any) -> None:
        keys.missing_keys[:] = sorted(needed - found.keys())
        keys.unexpected_keys[:] = sorted(found.keys() - needed - known)

    register: list[tuple[Any, Any]] = [
        (module.register_load_state_dict_pre_hook, before),
        (module.register_load_state_dict_post_hook, after),
    ]
    hooks = [function(hook) for function, hook in register]
    try:
        module.load_state_dict(state, strict=module.strict_loading)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _misfits(pieces: Mapping[str, Piece], state: Mapping[str, Any]) -> list[str]:
    """A line for each value that is not a whole tensor of the shape it has in the model."""
    problems = []
    for name, piece in pieces.items():
        value = state[name]
        if not isinstance(value, Tensor) or tuple(value.shape) != piece.spec.full_shape:
            shown = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            problems.append(f"{name} is {shown} and {piece.spec.full_shape} in the model")
    return problems
