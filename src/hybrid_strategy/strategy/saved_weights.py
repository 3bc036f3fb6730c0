"""Weights of a checkpoint in the hands of the module: `on_load_checkpoint` and `load_state_dict` see whole tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning_utilities.core.overrides import is_overridden
from torch import Tensor

from hybrid_strategy.checkpoint.agreement import Ranks, Work
from hybrid_strategy.checkpoint.certificate import Certificate
from hybrid_strategy.checkpoint.loading import LoadOptions, load_checkpoint, read_whole, refuse_weights, saved_names
from hybrid_strategy.checkpoint.pieces import MODEL, Piece, section
from hybrid_strategy.errors import CheckpointError, message
from hybrid_strategy.strategy.own_loading import Taken, has_own_loading, own_parts, taken_from
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
    return is_overridden("on_load_checkpoint", module, pl.LightningModule) or has_own_loading(module)


def fill(
    module: pl.LightningModule,
    weights: Callable[[], dict[str, Piece]],
    state: Mapping[str, Any],
    certificate: Certificate,
    shared: Callable[[list[Any]], list[Any]],
) -> Certificate:
    """Fills this rank's pieces from a state dict that hooks have edited; collective.

    Args:
        weights: this rank's pieces by key; asked for when the module is done, since it may put other buffers in place.
        certificate: of what has been loaded so far.
        shared: what all ranks together have in their lists.

    Raises:
        CheckpointError: on every rank: a weight is missing or has no place, or has another shape.
    """
    others = dict(shared(list(further_names(module).items())))  # a rank may hold a weight under its further name alone
    known = {*others, *persistent_states(module)}
    path, own, placeless = Path(certificate.checkpoint), has_own_loading(module), list[str]()
    if own:
        taken: list[Taken] = []
        work = Work(str(path), "load", _advice(own_parts(module)))
        Ranks.of(None).collect(work, lambda: taken.append(taken_from(module, _under_all_names(state, others), known)))
        state, placeless = taken[0]
    pieces = {piece.spec.name: piece for piece in weights().values()}
    needed = set(shared(list(pieces)))
    absent = sorted(needed - state.keys())
    surplus = shared(sorted(each for each in {*placeless, *state.keys()} - needed - known if not each.endswith("_extra_state")))
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


def _advice(parts: Sequence[str]) -> str:
    return f"Parts of the model read it by code of their own, which sees whole tensors: {', '.join(parts)}" if parts else ""


def _under_all_names(state: Mapping[str, Any], others: Mapping[str, str]) -> dict[str, Any]:
    """With the further names of shared parameters, as torch saves them."""
    return {**state, **{name: state[saved] for name, saved in others.items() if saved in state and name not in state}}


def _misfits(pieces: Mapping[str, Piece], state: Mapping[str, Any]) -> list[str]:
    """A line for each value that is not a whole tensor of the shape it has in the model."""
    problems = []
    for name, piece in pieces.items():
        value = state[name]
        if not isinstance(value, Tensor) or tuple(value.shape) != piece.spec.full_shape:
            shown = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            problems.append(f"{name} is {shown} and {piece.spec.full_shape} in the model")
    return problems
