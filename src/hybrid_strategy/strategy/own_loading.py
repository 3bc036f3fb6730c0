"""What a module makes of a state dict while it loads it: `load_state_dict`, `_load_from_state_dict` and hooks, of parts too."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

import lightning.pytorch as pl
from torch import Tensor, nn

from hybrid_strategy.errors import CheckpointError, message
from hybrid_strategy.parallel.stages import whole_model_shown

_LIBRARIES = ("torch.", "torchmetrics.")
"""Modules of these fill in what older versions of theirs did not save, and read what they save themselves as it is."""


def has_own_loading(module: nn.Module) -> bool:
    """The module, a part of it or a hook changes what is loaded. The same on every rank."""
    with whole_model_shown(module):
        return type(module).load_state_dict is not nn.Module.load_state_dict or any(map(_changes, module.modules()))


def _changes(part: nn.Module) -> bool:
    hooks = [getattr(each, "hook", each) for each in part._load_state_dict_pre_hooks.values()]
    return bool(part._load_state_dict_post_hooks) or any(map(_is_foreign, [type(part)._load_from_state_dict, *hooks]))


def _is_foreign(function: Callable[..., Any]) -> bool:
    where = getattr(function, "__module__", None) or type(function).__module__
    return not f"{where}.".startswith(_LIBRARIES)


def own_parts(module: nn.Module) -> list[str]:
    """The parts whose `_load_from_state_dict` is their own."""
    with whole_model_shown(module):
        return [name for name, part in module.named_modules() if _is_foreign(type(part)._load_from_state_dict)]


class Taken(NamedTuple):
    """What a module has made of a state dict.

    Attributes:
        placed: values by the name in the model.
        placeless: entries that it has no place for.
    """

    placed: dict[str, Any]
    placeless: list[str]


def taken_from(module: pl.LightningModule, state: Mapping[str, Any], known: Collection[str]) -> Taken:
    """What the module places of a state dict when it loads it, by the name in the model; nothing of the model is changed.

    Where torch is about to copy an entry, it is noted, and torch gets the tensor that is there: what this rank holds is a piece.

    Args:
        state: whole tensors.
        known: names that need not be in it, further names of shared parameters among them.

    Raises:
        RuntimeError: torch's own: names do not match, where the module asks it to be strict.
        CheckpointError: a part places its weights by itself.
    """
    with whole_model_shown(module):
        parts, found = dict(module.named_modules()), dict[str, Any]()
        seen, surplus = set[str](), list[str]()
        at_the_end: Callable[[Any], Any] = module.register_load_state_dict_post_hook
        removers: list[Any] = [at_the_end(_leaving_out(known, surplus))]
        removers += [part.register_load_state_dict_pre_hook(_noting(name, found, seen)) for name, part in parts.items()]
        try:
            module.load_state_dict(state, strict=module.strict_loading)
        finally:
            for each in removers:
                each.remove()
        for name in own_parts(module):
            if name not in seen and any(_states_of(parts[name])):
                rule = "_load_from_state_dict of this part places weights by itself, and this rank may hold pieces of them"
                raise CheckpointError(
                    message("module", name, rule, "", "Let it change the state dict and call that of nn.Module")
                )
    return Taken(found, surplus)


def _noting(name: str, found: dict[str, Any], seen: set[str]) -> Callable[..., None]:
    def note(part: nn.Module, handed: dict[str, Any], prefix: str, *_: Any) -> None:
        seen.add(name)
        for local, there in _states_of(part):
            if f"{prefix}{local}" in handed:
                found[f"{name}.{local}" if name else local] = handed[f"{prefix}{local}"]
                handed[f"{prefix}{local}"] = there

    return note


def _leaving_out(known: Collection[str], surplus: list[str]) -> Callable[..., None]:
    def leave_out(_: nn.Module, keys: Any) -> None:
        keys.missing_keys[:] = [each for each in keys.missing_keys if each not in known and not each.endswith("_extra_state")]
        surplus.extend(keys.unexpected_keys)

    return leave_out


def _states_of(part: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The parameters and persistent buffers of this part, without those of its own parts."""
    buffers = {name: each for name, each in part._buffers.items() if name not in part._non_persistent_buffers_set}
    return ((name, each) for name, each in {**part._parameters, **buffers}.items() if each is not None)
