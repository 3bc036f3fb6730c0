"""What the planner must know of a LightningModule, counted on the meta device."""

from __future__ import annotations

import copy
from collections import Counter

import lightning.pytorch as pl
import torch
from torch import nn

from hybrid_strategy.errors import ConfigError
from hybrid_strategy.planning.hf_config import shape_from_config
from hybrid_strategy.spec.model_shape import ModelShape

_HEADS = ("num_attention_heads", "num_heads", "n_head", "n_heads", "heads", "nhead")
_HEAD_SIZE = 64


def as_built(module: pl.LightningModule) -> nn.Module:
    """The module with what `configure_model` would give it, on the meta device; the module itself stays as it is."""
    if any(True for _ in module.parameters()):
        return module
    probe = copy.copy(module)
    stores = ("_modules", "_parameters", "_buffers")
    vars(probe).update({name: dict(vars(module)[name]) for name in stores})
    try:
        with torch.device("meta"):
            probe.configure_model()
    except Exception:  # the user's own code, called where it does not expect it: then nothing is known
        return module
    return probe


def count_parameters(module: nn.Module) -> int:
    """Parameters, shared ones once."""
    return sum(each.numel() for each in module.parameters())


def told_shape(module: nn.Module) -> ModelShape | None:
    """The shape that a module, or one of its children, tells: a `ModelShape`, or a Hugging Face configuration."""
    for each in (module, *module.children()):
        shape = getattr(each, "shape", None)
        if isinstance(shape, ModelShape):
            return shape
        to_dict = getattr(getattr(each, "config", None), "to_dict", None)
        if callable(to_dict):
            try:
                return shape_from_config(to_dict())
            except ConfigError:
                return None
    return None


def equivalent_shape(module: nn.Module, sequence_length: int) -> ModelShape | None:
    """A decoder with as many layers, parameters of a layer, width and words as a module that does not tell its shape.

    None where there is no list of layers: then nothing can be said of what is between them.
    """
    lists = [each for each in module.modules() if isinstance(each, nn.ModuleList) and len(each)]
    if not lists:
        return None
    layers = max(lists, key=count_parameters)
    embeddings = [each for each in module.modules() if isinstance(each, nn.Embedding)]
    largest = max(embeddings, key=lambda each: each.weight.numel(), default=None)
    hidden = largest.embedding_dim if largest is not None else _width(layers)
    if not hidden:
        return None
    each_layer = count_parameters(layers) // len(layers)
    inner = max(1, round((each_layer - 4 * hidden * hidden - 2 * hidden) / (3 * hidden)))
    words = largest.num_embeddings if largest is not None else 1
    outside = count_parameters(module) - count_parameters(layers)
    heads = _heads(layers, hidden)
    tied = outside < 1.5 * words * hidden
    return ModelShape(hidden, len(layers), heads, inner, words, sequence_length, family="decoder", tied_embeddings=tied)


def _width(layers: nn.ModuleList) -> int:
    """The most frequent size of vectors (norms and biases)."""
    sizes = Counter(each.numel() for each in layers.parameters() if each.ndim == 1)
    return sizes.most_common(1)[0][0] if sizes else 0


def _heads(layers: nn.ModuleList, hidden: int) -> int:
    for each in layers.modules():
        for name in _HEADS:
            value = getattr(each, name, None)
            if isinstance(value, int) and value > 0 and hidden % value == 0:
                return value
    return hidden // _HEAD_SIZE if hidden % _HEAD_SIZE == 0 else 1
