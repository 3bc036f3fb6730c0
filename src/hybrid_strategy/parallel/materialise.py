"""Gives parameters on the meta device their first values: the same in every layout, one parameter at a time.

A parameter is initialised in full, from a generator keyed by (seed, its name), and each rank keeps its piece. A model says how
with `init_parameter(name, tensor, generator)`; where it does not, the layer's own `reset_parameters` is run on a whole copy of
that layer, under a random state keyed by (seed, the layer's name).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hybrid_strategy.distributed.random_state import keyed_seed
from hybrid_strategy.errors import ModelError, message


class Initialiser:
    """First values of whole parameters.

    Args:
        root: the module whose names key the values, with its whole shapes recorded before anything was split.
        seed: the run's seed.
    """

    def __init__(self, root: nn.Module, seed: int) -> None:
        self._seed = seed
        self._rule: Callable[[str, Tensor, torch.Generator], Any] | None = getattr(root, "init_parameter", None)
        self._layers = {name: _whole_copy(layer) for name, layer in root.named_modules() if _needs_reset(layer, self._rule)}
        self._shapes = {name: (tuple(p.shape), p.dtype) for name, p in root.named_parameters(remove_duplicate=False)}

    def whole(self, name: str) -> Tensor:
        """The whole first value of parameter `name`, on the CPU."""
        shape, dtype = self._shapes[name]
        if self._rule is not None:
            tensor = torch.empty(shape, dtype=dtype)
            with torch.no_grad():
                self._rule(name, tensor, torch.Generator().manual_seed(keyed_seed(self._seed, name)))
            return tensor
        prefix, _, attribute = name.rpartition(".")
        return self._reset(prefix)[attribute]

    def _reset(self, prefix: str) -> dict[str, Tensor]:
        if prefix not in self._layers:
            raise ModelError(
                message(
                    "module",
                    prefix or "the model",
                    "a parameter on the meta device needs a rule for its first value",
                    "its layer has no reset_parameters",
                    "Give the model init_parameter(name, tensor, generator), or build it on a real device",
                )
            )
        layer = copy.deepcopy(self._layers[prefix]).to_empty(device="cpu")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(keyed_seed(self._seed, prefix))
            reset: Callable[[], None] = layer.reset_parameters  # type: ignore[assignment]
            reset()
        return dict(layer.named_parameters(recurse=False))


def _needs_reset(layer: nn.Module, rule: object) -> bool:
    on_meta = any(parameter.is_meta for parameter in layer.parameters(recurse=False))
    return rule is None and on_meta and callable(getattr(layer, "reset_parameters", None))


def _whole_copy(layer: nn.Module) -> nn.Module:
    """The layer as it is before it is split, on the meta device: dictionaries of its own, the same settings, no hooks."""
    copied = copy.copy(layer)
    own = vars(copied)
    own |= {name: type(hooks)() for name, hooks in vars(nn.Module()).items() if "_hooks" in name}
    own["_parameters"] = {name: _on_meta(each) for name, each in layer._parameters.items()}
    own["_buffers"] = {name: _on_meta(each) for name, each in layer._buffers.items()}
    own["_modules"] = {name: None if each is None else _whole_copy(each) for name, each in layer._modules.items()}
    return copied


def _on_meta(tensor: Tensor | None) -> Tensor | None:
    if tensor is None or tensor.is_meta:
        return tensor
    moved = tensor.detach().to("meta")
    return nn.Parameter(moved, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else moved


def check_buffers(root: nn.Module) -> None:
    """Refuses buffers on the meta device: nothing says what they should hold."""
    for name, buffer in root.named_buffers():
        if buffer.is_meta:
            raise ModelError(
                message(
                    "module",
                    name,
                    "a buffer on the meta device has no values",
                    f"its shape is {tuple(buffer.shape)}",
                    "Compute it in forward, or build the model on a real device",
                )
            )
