"""Family `gpt` in Hugging Face's files: `GPT2LMHeadModel`: matrices transposed; query, key and value one tensor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybrid_strategy.errors import ModelError, message
from hybrid_strategy.spec.exchange import Exchange, ForeignTensor
from hybrid_strategy.spec.model_shape import ModelShape

_OUTSIDE = {
    "embed_tokens.weight": "transformer.wte.weight",
    "embed_positions.table.weight": "transformer.wpe.weight",
    "norm.weight": "transformer.ln_f.weight",
    "norm.bias": "transformer.ln_f.bias",
}
_IN_LAYER = {
    "input_layernorm": ("ln_1", (0, 1)),
    "post_attention_layernorm": ("ln_2", (0, 1)),
    "self_attn.q_proj": ("attn.c_attn", (0, 3)),
    "self_attn.k_proj": ("attn.c_attn", (1, 3)),
    "self_attn.v_proj": ("attn.c_attn", (2, 3)),
    "self_attn.o_proj": ("attn.c_proj", (0, 1)),
    "mlp.up_proj": ("mlp.c_fc", (0, 1)),
    "mlp.down_proj": ("mlp.c_proj", (0, 1)),
}


def config(shape: ModelShape, options: Mapping[str, Any]) -> dict[str, Any]:
    """What `config.json` holds.

    Raises:
        ModelError: GPT-2 has no such heads, or always has biases.
    """
    _check(shape)
    dropout = float(options.get("dropout", 0.0))
    return {
        "architectures": [EXCHANGE.architecture],
        "model_type": "gpt2",
        "vocab_size": shape.vocab_size,
        "n_embd": shape.hidden_size,
        "n_inner": shape.intermediate_size,
        "n_layer": shape.num_layers,
        "n_head": shape.num_attention_heads,
        "n_positions": shape.sequence_length,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": float(options.get("norm_eps", 1e-5)),
        "resid_pdrop": dropout,
        "embd_pdrop": dropout,
        "attn_pdrop": dropout,
        "tie_word_embeddings": shape.tied_embeddings,
        "bos_token_id": None,
        "eos_token_id": None,
    }


def tensor(name: str, shape: ModelShape) -> ForeignTensor | None:
    """Where the parameter lies."""
    if name == "lm_head.weight":
        return ForeignTensor("transformer.wte.weight", again=True) if shape.tied_embeddings else ForeignTensor(name)
    if name in _OUTSIDE:
        return ForeignTensor(_OUTSIDE[name])
    layer, _, rest = name.removeprefix("layers.").partition(".")
    owner, _, kind = rest.rpartition(".")
    if not name.startswith("layers.") or owner not in _IN_LAYER:
        return None
    foreign, part = _IN_LAYER[owner]
    is_matrix = kind == "weight" and "layernorm" not in owner
    return ForeignTensor(f"transformer.h.{layer}.{foreign}.{kind}", is_matrix, part)


def _check(shape: ModelShape) -> None:
    if shape.kv_heads != shape.num_attention_heads:
        rule = "GPT-2 has a key/value head for each query head"
        numbers = f"num_attention_heads is {shape.num_attention_heads}"
        raise ModelError(message("model.num_key_value_heads", shape.kv_heads, rule, numbers, "Export under its own names"))
    if shape.head_size * shape.num_attention_heads != shape.hidden_size:
        rule = "in GPT-2 the heads divide hidden_size among them"
        numbers = f"{shape.num_attention_heads} heads of {shape.hidden_size}"
        raise ModelError(message("model.head_dim", shape.head_size, rule, numbers, "Export under its own names"))
    if not shape.bias:
        raise ModelError(message("model.bias", False, "GPT-2 always has biases", "", "Export under its own names"))


_FREE = ("model_type", "tie_word_embeddings", "resid_pdrop", "embd_pdrop", "attn_pdrop", "bos_token_id", "eos_token_id")
EXCHANGE = Exchange("GPT2LMHeadModel", config, tensor, _FREE)
