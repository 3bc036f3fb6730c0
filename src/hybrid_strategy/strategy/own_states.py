"""What a module, its metrics and hooks make of the state dict that is saved: entries left out, renamed, exchanged and added."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
from lightning_utilities.core.overrides import is_overridden
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torchmetrics import Metric

from hybrid_strategy.checkpoint.pieces import Piece, model_key, trained_key
from hybrid_strategy.errors import CheckpointError, message
from hybrid_strategy.parallel.stages import whole_model_shown

ADDED = "added"
"""Section of a checkpoint's replicated values: entries of the state dict that are neither a weight nor a buffer of the model."""
_EXTRA_STATE = "_extra_state"


def further_names(module: nn.Module) -> dict[str, str]:
    """The other names of parameters that stand in several places, each with the name that they are saved under."""
    found: dict[str, str] = {}
    first: dict[int, str] = {}
    with whole_model_shown(module):
        for name, parameter in module.named_parameters(remove_duplicate=False):
            saved = first.setdefault(id(parameter), name)
            if saved != name:
                found[name] = saved
    return found


def persistent_states(module: nn.Module) -> dict[str, tuple[Metric, str]]:
    """The states that metrics were told to save (`persistent(True)`): name in the state dict -> metric and attribute."""
    metrics = [(name, each) for name, each in module.named_modules() if isinstance(each, Metric)]
    return {
        f"{name}.{state}" if name else state: (each, state)
        for name, each in metrics
        for state, kept in each._persistent.items()
        if kept
    }


def given_state(
    module: pl.LightningModule, pieces: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Any]:
    """The state dict that is saved before hooks see it: this rank's pieces, less and more what `state_dict` of the module says.

    Args:
        pieces: this rank's, by the un-split model's names.
        shapes: of all parameters of the un-split model. Where a hook may edit the state dict it has an entry for each, on the
            meta device for those (and buffers) that other ranks hold, so that it does the same on every rank.
    """
    found: dict[str, Any] = dict(pieces)
    if _edits(module):
        with whole_model_shown(module):
            whole = {name: tuple(buffer.shape) for name, buffer in persistent_buffers(module)} | dict(shapes)
        found |= {name: torch.empty(shape, device="meta") for name, shape in whole.items() if name not in pieces}
    if not _has_own_state_dict(module):
        return found
    sources, others = _asked(module)
    metrics = persistent_states(module)
    named = {name: found[source] for name, source in sources.items() if source in found}
    return {**named, **{name: value for name, value in others.items() if name not in metrics}}


def _edits(module: pl.LightningModule) -> bool:
    callbacks: list[pl.Callback] = module.trainer.callbacks  # type: ignore[attr-defined]
    return is_overridden("on_save_checkpoint", module, pl.LightningModule) or any(
        type(each).on_save_checkpoint is not pl.Callback.on_save_checkpoint for each in callbacks
    )


def _has_own_state_dict(module: nn.Module) -> bool:
    """Metrics that save no state of their own count as plain modules."""
    return any(
        (type(each).state_dict is not nn.Module.state_dict and not isinstance(each, Metric))
        or type(each)._save_to_state_dict is not nn.Module._save_to_state_dict
        or each._state_dict_hooks
        or each._state_dict_pre_hooks
        for each in module.modules()
    )


def _asked(module: nn.Module) -> tuple[dict[str, str], dict[str, Any]]:
    """What the module's own `state_dict` gives: (name there -> name in the model) of its weights and buffers, and all else.

    Another name of a shared parameter is not another entry.
    """
    with whole_model_shown(module):
        tensors = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
        names = _Names((name, each) for name, each in tensors)
        state: Mapping[str, Any] = module.state_dict()
    found = {name: names.find(name, value) for name, value in state.items() if not name.endswith(_EXTRA_STATE)}
    sources = {name: source for name, source in found.items() if source is not None}
    held = {source for name, source in sources.items() if name == source}
    sources = {name: source for name, source in sources.items() if name == source or source not in held}
    return sources, {name: state[name] for name, source in found.items() if source is None}


class _Names:
    """Finds the name of a tensor, also when it has been detached."""

    def __init__(self, named: Iterable[tuple[str, Any]]) -> None:
        self._by_name: dict[str, Any] = {}
        self._by_identity: dict[int, str] = {}
        self._by_memory: dict[Any, str] = {}
        for name, each in named:
            self._by_name[name] = each
            self._by_identity.setdefault(id(each), name)
            if isinstance(each, Tensor) and each.numel():
                self._by_memory.setdefault(_memory(each), name)

    def find(self, name: str, value: Any) -> str | None:
        """The first name of `value`, `name` where that is one of them; None if it is not among the tensors."""
        if not isinstance(value, Tensor):
            return None
        known = self._by_name.get(name)
        if known is not None and known.shape == value.shape and _memory(known) == _memory(value):
            return self._by_identity.get(id(known), name)
        return self._by_identity.get(id(value)) or (self._by_memory.get(_memory(value)) if value.numel() else None)


def _memory(tensor: Tensor) -> Any:
    storage = tensor.untyped_storage()
    return storage._cdata, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype


@dataclass(frozen=True)
class Edits:
    """What has become of a state dict in the hands of hooks.

    Attributes:
        names: name that is saved -> name in the model.
        exchanged: values in place of this rank's pieces.
        added: entries that are neither.
    """

    names: dict[str, str] = field(default_factory=dict)
    exchanged: dict[str, Tensor] = field(default_factory=dict)
    added: dict[str, Any] = field(default_factory=dict)

    @property
    def only_removed(self) -> bool:
        return not self.exchanged and all(name == source for name, source in self.names.items())

    @staticmethod
    def between(pieces: Mapping[str, Tensor], given: Mapping[str, Any], final: Mapping[str, Any]) -> Edits:
        """Compares what was given to hooks with what they left.

        Raises:
            CheckpointError: a value was computed from a part of the model that another rank holds.
        """
        given_names, piece_names = _Names(given.items()), _Names(pieces.items())
        edits = Edits()
        for name, value in final.items():
            source = piece_names.find(name, value) or given_names.find(name, value)
            if source is not None:
                edits.names[name] = source
            elif isinstance(value, Tensor) and value.is_meta:
                rule = "it was computed from a part of the model that another rank holds"
                raise CheckpointError(message("state_dict entry", name, rule, "", "Compute it in on_load_checkpoint"))
            elif isinstance(value, Tensor) and name in pieces and value.shape == pieces[name].shape:
                edits.exchanged[name] = value
            else:
                edits.added[name] = value
        return edits

    def applied(self, tensors: Mapping[str, Piece], names: Collection[str]) -> dict[str, Piece]:
        """The pieces to save.

        Args:
            tensors: without edits, by key.
            names: of this rank's weights and buffers.
        """
        gone = {trained_key(name) for name in names if name not in self.names and name not in self.exchanged}
        replaced = {model_key(name) for name in names}
        found = {key: piece for key, piece in tensors.items() if key not in gone | replaced}
        for name, source in self.names.items():
            if model_key(source) in tensors:
                found[model_key(name)] = tensors[model_key(source)]
        for name, value in self.exchanged.items():
            if model_key(name) in tensors:
                found[model_key(name)] = Piece(tensors[model_key(name)].spec, value)
        return found


def metric_states(module: nn.Module, owned: Callable[[Iterable[str]], set[str]], sees_all: bool) -> dict[str, Any]:
    """The persistent states of metrics that this rank saves.

    Args:
        owned: those of the names that are this rank's to save.
        sees_all: a rank sees all samples of a step. Else each has a state of its own, none of which is that of the run.
    """
    states = persistent_states(module)
    if states and not sees_all:
        names = ", ".join(sorted(states))
        rank_zero_warn(f"{names}: persistent states of metrics are not saved where data-parallel ranks see different samples")
    return {name: getattr(*states[name]) for name in owned(states)} if sees_all else {}


def restore_metrics(module: nn.Module, added: dict[str, Any], sees_all: bool) -> list[tuple[str, str]]:
    """Gives metrics their states back and takes them out of `added`; returns (what, why) of those without one."""
    gaps = []
    for name, (metric, state) in persistent_states(module).items():
        value = added.pop(name, None)
        if value is None:
            gaps.append((f"state of the metric {name}", "it is not in the checkpoint"))
        elif not sees_all:
            gaps.append((f"state of the metric {name}", "each data-parallel rank has one of its own"))
        else:
            setattr(metric, state, value.to(metric.device) if isinstance(value, Tensor) else value)
    return gaps


def persistent_buffers(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Buffers that are saved, by name; one that stands in two places has two."""

    def found() -> Iterator[tuple[str, Tensor]]:
        for prefix, each in module.named_modules():
            for name, buffer in each._buffers.items():
                if buffer is not None and name not in each._non_persistent_buffers_set:
                    yield (f"{prefix}.{name}" if prefix else name), buffer

    return list(found())


def modules_with_extra_state(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Modules that keep something beside weights and buffers (`get_extra_state`), by name."""
    return [(name, each) for name, each in module.named_modules() if type(each).get_extra_state is not nn.Module.get_extra_state]
