from __future__ import annotations

import pytest

from hybrid_strategy.errors import ModelError
from hybrid_strategy.planning.hf_config import shape_from_config

LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}
OPT = {
    "model_type": "opt",
    "hidden_size": 768,
    "ffn_dim": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "vocab_size": 50272,
    "max_position_embeddings": 2048,
}


def test_llama_3_8b() -> None:
    shape = shape_from_config(LLAMA, sequence_length=8192)
    assert shape.num_parameters == 8_030_261_248
    assert (shape.kv_heads, shape.sequence_length, shape.gated_mlp) == (8, 8192, True)
    assert shape_from_config(LLAMA).sequence_length == 131072


def test_opt_125m() -> None:
    """125,239,296 parameters, less two positions that OPT keeps for padding."""
    assert shape_from_config(OPT).num_parameters == 125_239_296 - 2 * 768


def test_the_text_part_of_a_larger_model() -> None:
    assert shape_from_config({"model_type": "mllama", "text_config": LLAMA}).hidden_size == 4096


def test_one_key_value_head() -> None:
    assert shape_from_config({**OPT, "model_type": "falcon", "multi_query": True}).kv_heads == 1


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"num_local_experts": 8}, "a model of experts cannot be planned yet"),
        ({"hidden_size": None}, "the configuration does not say hidden_size"),
        ({"max_position_embeddings": None}, "names no sequence length"),
    ],
)
def test_refusals(change: dict[str, object], match: str) -> None:
    with pytest.raises(ModelError, match=match):
        shape_from_config({**LLAMA, **change})
