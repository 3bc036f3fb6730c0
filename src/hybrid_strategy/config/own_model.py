"""The shape of a model of the user's own: the module is built on the meta device and counted. Imports torch."""

from __future__ import annotations

from dataclasses import replace

from hybrid_strategy.config.build import make
from hybrid_strategy.config.named_target import check_targets
from hybrid_strategy.config.settings import RunConfig
from hybrid_strategy.spec.model_shape import ModelShape

_LENGTHS = ("sequence_length", "max_sequence_length", "max_seq_len", "block_size", "context_length")


def own_shape(config: RunConfig) -> tuple[ModelShape | None, str]:
    """The shape, and how it came about.

    Raises:
        ConfigError: the module cannot be made.
    """
    check_targets(replace(config, data={}, callbacks={}, logger={}))
    import torch

    from hybrid_strategy.strategy.counting import as_built, count_parameters, equivalent_shape, told_shape

    with torch.device("meta"):
        module = as_built(make(config.model, "model"))
    name, length = type(module).__name__, _sequence_length(config)
    told = told_shape(module)
    if told is not None:
        return (replace(told, sequence_length=length) if length else told), f"the sizes are those that {name} tells"
    count = count_parameters(module)
    if not length:
        return None, f"{name} has {count:,} parameters; the length of a sample is not known (data.sequence_length)"
    shape = equivalent_shape(module, length)
    if shape is None:
        return None, f"{name} has {count:,} parameters, but no list of layers"
    return shape, f"{name} has {count:,} parameters; it is planned as a decoder of {shape.num_parameters:,} with layers as large"


def _sequence_length(config: RunConfig) -> int:
    for values in (config.data, config.model):
        for key in _LENGTHS:
            if isinstance(values.get(key), int):
                return int(values[key])
    return 0
