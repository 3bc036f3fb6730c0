"""Family `llama` in Hugging Face's files: `LlamaForCausalLM`. All names but the prefix are the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybrid_strategy.spec.exchange import Exchange, ForeignTensor
from hybrid_strategy.spec.model_shape import ModelShape


def config(shape: ModelShape, options: Mapping[str, Any]) -> dict[str, Any]:
    """What `config.json` holds. `rope_theta` stands where versions of transformers before 5 look, too."""
    theta = float(options.get("rope_theta", 10000.0))
    return {
        "architectures": [EXCHANGE.architecture],
        "model_type": "llama",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_size,
        "max_position_embeddings": shape.sequence_length,
        "rms_norm_eps": float(options.get("norm_eps", 1e-5)),
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "rope_theta": theta,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": shape.tied_embeddings,
    }


def tensor(name: str, shape: ModelShape) -> ForeignTensor:
    """Where the parameter lies."""
    if name == "lm_head.weight":
        return ForeignTensor("model.embed_tokens.weight", again=True) if shape.tied_embeddings else ForeignTensor(name)
    return ForeignTensor(f"model.{name}")


EXCHANGE = Exchange(
    "LlamaForCausalLM",
    config,
    tensor,
    free=("model_type", "max_position_embeddings", "tie_word_embeddings"),
    absent=("rope_scaling",),
)
