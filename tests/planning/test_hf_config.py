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
    falcon = {**OPT, "model_type": "falcon", "multi_query": True, "num_kv_heads": 8}
    assert shape_from_config(falcon).kv_heads == 1
    assert shape_from_config({**falcon, "new_decoder_architecture": True}).kv_heads == 8


def test_heads_that_are_tied_though_the_file_does_not_say_so() -> None:
    """StarCoder2 3B and Command R 35B; a SwiGLU of Nemotron 8B would have half as many parameters again."""
    shared = {"num_attention_heads": 64, "max_position_embeddings": 8192, "vocab_size": 256000}
    command = {**shared, "model_type": "cohere", "hidden_size": 8192, "intermediate_size": 22528, "num_hidden_layers": 40}
    assert shape_from_config(command).num_parameters == pytest.approx(34.98e9, rel=1e-3)
    nemotron = {**command, "model_type": "nemotron"}
    assert (shape_from_config(nemotron).gated_mlp, shape_from_config(nemotron).tied_embeddings) == (False, False)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"num_local_experts": 8}, "a model of experts cannot be planned yet"),
        ({"ffn_config": {"moe_num_experts": 16}}, "a model of experts cannot be planned yet"),
        ({"architectures": ["BertForMaskedLM"]}, "only decoders can be planned"),
        ({"is_encoder_decoder": True}, "only decoders can be planned"),
        ({"hidden_size": None}, "the configuration does not say hidden_size"),
        ({"max_position_embeddings": None}, "names no sequence length"),
    ],
)
def test_refusals(change: dict[str, object], match: str) -> None:
    with pytest.raises(ModelError, match=match):
        shape_from_config({**LLAMA, **change})
