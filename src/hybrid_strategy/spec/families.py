"""What the shipped model families can be built as: known without importing them."""

from __future__ import annotations

from collections.abc import Mapping

from hybrid_strategy.spec.model_shape import ModelShape

_WANTED: Mapping[str, Mapping[str, bool]] = {
    "llama": {"bias": False, "learned_positions": False, "gated_mlp": True},
    "gpt": {"gated_mlp": False, "learned_positions": True},
}
"""Family -> fields of the shape that can have one value only."""

OPTIONS: Mapping[str, tuple[str, ...]] = {"llama": ("rope_theta", "norm_eps"), "gpt": ("dropout", "norm_eps")}
"""Family -> what its models take beside the shape (`model.options`)."""

_WORDS = {"bias": "biases", "learned_positions": "learned positions", "gated_mlp": "gated MLP"}
_SIZES = ("hidden_size", "num_layers", "num_attention_heads", "intermediate_size", "vocab_size", "sequence_length")

Refusal = tuple[str, object, str, str, str]
"""The field, its value, the rule, the numbers, what to set."""


def shape_refusal(shape: ModelShape) -> Refusal | None:
    """Why a family cannot be built in this shape; None where it can, as far as the family is one of ours.

    >>> shape_refusal(ModelShape(64, 2, 4, 128, 512, 32, bias=True))[:3]
    ('bias', True, 'the family llama has no biases')
    >>> shape_refusal(ModelShape(64, 2, 4, 128, 512, 32)) is None
    True
    """
    for name in _SIZES:
        if getattr(shape, name) < 1:
            return name, getattr(shape, name), "it must be a whole number of 1 or more", "", "Set 1 or more"
    heads = shape.num_attention_heads
    if heads % shape.kv_heads:
        valid = " or ".join(str(each) for each in range(1, heads + 1) if heads % each == 0)
        numbers = f"{shape.kv_heads} does not divide {heads}"
        return "num_key_value_heads", shape.kv_heads, "it must divide num_attention_heads", numbers, f"Set it to {valid}"
    if not shape.head_dim and shape.hidden_size % heads:
        rule, numbers = "num_attention_heads must divide it", f"{heads} does not divide {shape.hidden_size}"
        return "hidden_size", shape.hidden_size, rule, numbers, f"Set a multiple of {heads}, or head_dim"
    if not shape.learned_positions and shape.head_size % 2:
        rule, numbers = "rotary positions turn pairs of its dimensions", f"{shape.head_size} is odd"
        if shape.head_dim:
            return "head_dim", shape.head_dim, rule, numbers, f"Set {shape.head_dim - 1 or 2} or {shape.head_dim + 1}"
        numbers = f"{shape.hidden_size} / {heads} heads = {numbers}"
        return "hidden_size", shape.hidden_size, rule, numbers, f"Set a multiple of {2 * heads}, or head_dim"
    for name, wanted in _WANTED.get(shape.family, {}).items():
        if getattr(shape, name) is not wanted:
            rule = f"the family {shape.family} has {'' if wanted else 'no '}{_WORDS[name]}"
            other = "gpt" if shape.family == "llama" else "llama"
            return name, not wanted, rule, "", f"Set {str(wanted).lower()}, or family {other}"
    return None
