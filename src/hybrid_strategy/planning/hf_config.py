"""The shape of a model from a Hugging Face `config.json`, without transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybrid_strategy.errors import ModelError, message
from hybrid_strategy.spec.model_shape import ModelShape

_NAMES = {
    "hidden_size": ("hidden_size", "n_embd", "d_model", "dim"),
    "num_layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("num_attention_heads", "n_head", "n_heads"),
    "vocab_size": ("vocab_size",),
}

_LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx")
_INNER = ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size")

_PLAIN = {"gpt2", "gpt_neo", "gpt_neox", "gptj", "opt", "bloom", "mpt", "falcon", "phi", "starcoder2", "gpt_bigcode", "codegen"}
_PLAIN |= {"nemotron", "persimmon", "xglm", "biogpt"}
"""Model types whose MLP has two matrices; all others are taken to have three (SwiGLU and its kin)."""

_BIASED = {"gpt2", "gpt_neo", "gpt_neox", "opt", "bloom", "phi", "starcoder2", "gpt_bigcode"}
_LEARNED_POSITIONS = {"gpt2", "gpt_neo", "opt", "gpt_bigcode"}
_TIED = {"gpt2", "gpt_neo", "opt", "bloom", "mpt", "falcon", "gpt_bigcode", "gemma", "gemma2", "gemma3_text"}
_TIED |= {"starcoder2", "cohere", "cohere2", "smollm3"}
"""Model types that tie the head to the embedding unless their configuration says otherwise."""

_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


def shape_from_config(config: Mapping[str, Any], sequence_length: int | None = None) -> ModelShape:
    """The shape that planning needs.

    Args:
        config: the parsed `config.json` (of a text model, or with its text part under `text_config`).
        sequence_length: default: `max_position_embeddings` and its other names.

    Raises:
        ModelError: a size that is not there, or experts, which are not modelled.

    >>> shape_from_config({"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257,
    ...                    "n_positions": 1024}).num_parameters
    124439808
    """
    values = config.get("text_config") or config
    kind = str(values.get("model_type", config.get("model_type", "")))
    _check_decoder(config, kind)
    _check_dense(values)
    sizes = {name: _first(values, name, keys) for name, keys in _NAMES.items()}
    heads = sizes["num_attention_heads"]
    length = sequence_length or next((int(values[key]) for key in _LENGTHS if values.get(key)), 0)
    if not length:
        rule = "the configuration names no sequence length"
        raise ModelError(message("model config", kind, rule, f"Looked for {', '.join(_LENGTHS)}", "Set model.sequence_length"))
    inner = next((int(values[key]) for key in _INNER if values.get(key)), 4 * sizes["hidden_size"])
    return ModelShape(
        hidden_size=sizes["hidden_size"],
        num_layers=sizes["num_layers"],
        num_attention_heads=heads,
        intermediate_size=inner,
        vocab_size=sizes["vocab_size"],
        sequence_length=length,
        num_key_value_heads=_kv_heads(values, heads),
        head_dim=int(values.get("head_dim") or 0),
        family=kind or "decoder",
        gated_mlp=kind not in _PLAIN,
        tied_embeddings=bool(values.get("tie_word_embeddings", kind in _TIED)),
        bias=kind in _BIASED,
        learned_positions=kind in _LEARNED_POSITIONS,
    )


def _check_decoder(config: Mapping[str, Any], kind: str) -> None:
    """Refuses encoders, and models with an encoder: their attention, losses and stages are others."""
    named = [str(each) for each in config.get("architectures") or ()]
    if config.get("is_encoder_decoder") or any("MaskedLM" in each for each in named):
        rule = "only decoders can be planned"
        raise ModelError(message("model config", kind, rule, ", ".join(named), "Give the configuration of a decoder"))


def _check_dense(values: Mapping[str, Any]) -> None:
    """Refuses models of experts."""
    everything = {**(values.get("ffn_config") or {}), **values}
    experts = next((key for key in _EXPERTS if everything.get(key)), None)
    if experts is not None:
        rule = "a model of experts cannot be planned yet"
        raise ModelError(message(f"model config key {experts}", everything[experts], rule, "", "Give a dense model"))


def _kv_heads(values: Mapping[str, Any], heads: int) -> int:
    """Heads of keys and values; Falcon says in words how many there are, and has a number that counts in its second form only."""
    grouped = values.get("num_kv_heads") if values.get("new_decoder_architecture") else None
    if values.get("multi_query") and not grouped:
        return 1
    return int(grouped or values.get("num_key_value_heads") or heads)


def _first(values: Mapping[str, Any], name: str, keys: tuple[str, ...]) -> int:
    for key in keys:
        if values.get(key):
            return int(values[key])
    rule = f"the configuration does not say {name}"
    raise ModelError(message("model config", values.get("model_type", ""), rule, f"Looked for {', '.join(keys)}", "Add it"))
