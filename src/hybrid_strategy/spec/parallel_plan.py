"""What a model must tell to be cut: its units in order, its tensor-parallel rules, its checkpoint units, its tied parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from typing import Any

from hybrid_strategy import registry
from hybrid_strategy.errors import ModelError, did_you_mean, message

TENSOR_STYLES = ("colwise", "rowwise", "replicate_input", "sequence_norm", "sequence_split", "vocab_embedding", "vocab_head")


@dataclass(frozen=True)
class ParallelPlan:
    """How a model may be parallelised. Patterns match dotted module names relative to the model; `*` is one name.

    Attributes:
        units: the model's units in the order in which `forward` calls them, e.g. `("embed_tokens", "layers.*", "norm",
            "lm_head")`. A pipeline may cut after any of them. The only live values that cross it are the output of the unit
            before it, and those that are `carried`. `layers.*` stands for the children in their own order.
        carried: units whose outputs later units are given past the units between them (an encoder's memory, a skip connection):
            a pipeline sends them over every cut behind them.
        tensor: module pattern -> style, one of `TENSOR_STYLES`. `colwise` splits a Linear's outputs, `rowwise` its inputs,
            `replicate_input` is the one point of a sub-block where the input becomes replicated (its backward is the
            all-reduce), `sequence_norm` is a norm whose input is split along the sequence under sequence parallelism,
            `sequence_split` a module whose whole output is split along it (learned positions), `vocab_embedding` and
            `vocab_head` split the vocabulary. A parameter that no rule names is a replica; where it works on split
            activations it must lie below a `replicate_input`, so that its gradient is summed.
        checkpoint_units: units recomputed in backward under activation checkpointing, default: every unit with a `*`.
        shard_units: units gathered together under `zero3`, default: `units`.
        tied: groups of parameter names that are one parameter.
        heads: divisors that `tensor_parallel_size` must divide, by their name in the model's configuration, e.g.
            `{"num_attention_heads": 8, "num_key_value_heads": 2}`.
        sequence_dims: argument of a unit -> the dimension that follows the sequence (`None`: passes whole), where context
            parallelism cannot tell it from the shape.
        batch_dims: argument or batch key -> its batch dimension (`None`: passes whole), where it is not 0.
    """

    units: tuple[str, ...] = ()
    tensor: Mapping[str, str] = field(default_factory=dict)
    checkpoint_units: tuple[str, ...] = ()
    shard_units: tuple[str, ...] = ()
    tied: tuple[tuple[str, ...], ...] = ()
    heads: Mapping[str, int] = field(default_factory=dict)
    batch_dims: Mapping[str, int | None] = field(default_factory=dict)
    sequence_dims: Mapping[str, int | None] = field(default_factory=dict)
    carried: tuple[str, ...] = ()


_LISTS = ("units", "checkpoint_units", "shard_units", "tied", "carried")


def plan_from(values: Mapping[str, Any], key: str = "parallel_plan") -> ParallelPlan:
    """A plan from plain data, as a configuration file holds it; `key` is where it stands there.

    Raises:
        ModelError: a field that a plan does not have, or one of another kind.

    >>> plan_from({"units": ["a", "b"], "tied": [["x", "y"]]}).tied
    (('x', 'y'),)
    """
    for name, value in values.items():
        _check_field(f"{key}.{name}", str(name), value)
    made: dict[str, Any] = {name: tuple(value) if name in _LISTS else value for name, value in values.items()}
    if "tied" in made:
        made["tied"] = tuple(tuple(group) for group in made["tied"])
    return ParallelPlan(**made)


def _check_field(key: str, name: str, value: Any) -> None:
    known = [each.name for each in fields(ParallelPlan)]
    if name not in known:
        raise ModelError(message(key, value, "a plan has no such field", "", did_you_mean(name, known)))
    if name not in _LISTS:
        if not isinstance(value, Mapping):
            raise ModelError(message(key, value, "it is a mapping", "", "Set such as {layers.0: ...}"))
        for pattern, style in value.items() if name == "tensor" else ():
            known = registry.names("parallel.tensor.styles")
            if style not in known:
                advice = did_you_mean(str(style), known)
                raise ModelError(message(f"{key}[{pattern!r}]", style, "there is no style of this name", "", advice))
    elif name == "tied":
        if not _is_list(value) or not all(_is_list(each) for each in value):
            raise ModelError(message(key, value, "it is a list of lists of names", "", "Set such as [[a.weight, b.weight]]"))
    elif not _is_list(value) or not all(isinstance(each, str) for each in value):
        raise ModelError(message(key, value, "it is a list of names", "", "Set such as [layers.*]"))


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def matches(pattern: str, name: str) -> bool:
    """Does the dotted `name` match `pattern`, where `*` stands for one whole part?

    >>> matches("layers.*.mlp", "layers.3.mlp"), matches("layers.*", "layers.3.mlp")
    (True, False)
    """
    want, have = pattern.split("."), name.split(".")
    return len(want) == len(have) and all(fnmatchcase(piece, part) for piece, part in zip(have, want, strict=True))
