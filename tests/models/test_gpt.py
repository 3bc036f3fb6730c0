"""The gpt family: the right parameter count, its own numbers, dropout only in training."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hybrid_strategy.errors import ModelError
from hybrid_strategy.models.gpt import GPT, PART
from hybrid_strategy.models.llama import Llama
from hybrid_strategy.spec.model_shape import ModelShape

SHAPE = ModelShape(
    hidden_size=32,
    num_layers=2,
    num_attention_heads=4,
    intermediate_size=48,
    vocab_size=65,
    sequence_length=16,
    family="gpt",
    gated_mlp=False,
    bias=True,
    learned_positions=True,
)
IDS = torch.randint(0, 65, (2, 16), generator=torch.Generator().manual_seed(1))


def test_logits_of_hugging_face() -> None:
    """GPT-2 keeps query, key and value in one transposed matrix."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=65, n_positions=16, n_embd=32, n_layer=2, n_head=4, n_inner=48, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    )
    theirs = transformers.GPT2LMHeadModel(config)
    for parameter in theirs.parameters():
        parameter.data.normal_(0.0, 0.2, generator=torch.Generator().manual_seed(parameter.numel()))
    ours, body = GPT(replace(SHAPE, tied_embeddings=True)), theirs.transformer
    with torch.no_grad():
        ours.embed_tokens.weight.copy_(body.wte.weight)
        ours.embed_positions.table.weight.copy_(body.wpe.weight)
        pairs = [(ours.norm, body.ln_f)]
        for layer, block in zip(ours.layers, body.h, strict=True):
            pairs += [(layer.input_layernorm, block.ln_1), (layer.post_attention_layernorm, block.ln_2)]
            matrices = [(layer.self_attn.o_proj, block.attn.c_proj.weight.T, block.attn.c_proj.bias)]
            names = ("q_proj", "k_proj", "v_proj")
            pieces = zip(names, block.attn.c_attn.weight.T.chunk(3), block.attn.c_attn.bias.chunk(3), strict=True)
            matrices += [(layer.self_attn.get_submodule(name), weight, bias) for name, weight, bias in pieces]
            matrices += [(layer.mlp.up_proj, block.mlp.c_fc.weight.T, block.mlp.c_fc.bias)]
            matrices += [(layer.mlp.down_proj, block.mlp.c_proj.weight.T, block.mlp.c_proj.bias)]
            for linear, weight, bias in matrices:
                linear.weight.copy_(weight)
                linear.bias.copy_(bias)
        for norm, other in pairs:
            norm.load_state_dict(other.state_dict())
    torch.testing.assert_close(ours(IDS), theirs(input_ids=IDS).logits, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("change", [{}, {"tied_embeddings": True}, {"bias": False}, {"num_key_value_heads": 2}])
def test_parameter_count_is_the_shapes(change: dict[str, int]) -> None:
    shape = replace(SHAPE, **change)
    model = PART.build(shape)
    assert PART.matches(model)
    assert not PART.matches(Llama(replace(shape, gated_mlp=True, bias=False, learned_positions=False)))
    assert sum(each.numel() for each in model.parameters()) == shape.num_parameters


def test_positions() -> None:
    model = PART.build(SHAPE)
    torch.testing.assert_close(model(IDS), model(IDS, torch.arange(16)))
    torch.testing.assert_close(model(IDS), model(IDS, torch.arange(16).expand(2, 16)))
    assert not torch.allclose(model(IDS), model(IDS, torch.arange(16).flip(0)))


def test_drops_out_in_training_only() -> None:
    model = PART.build(SHAPE, dropout=0.5)
    assert not torch.equal(model(IDS), model(IDS))
    model.eval()
    assert torch.equal(model(IDS), model(IDS))


def test_initial_values() -> None:
    model = PART.build(SHAPE)
    for name, parameter in model.named_parameters():
        model.init_parameter(name, parameter.data, torch.Generator().manual_seed(3))
    layer = model.layers[1]
    assert torch.equal(layer.input_layernorm.weight, torch.ones(32))
    assert torch.equal(layer.input_layernorm.bias, torch.zeros(32))
    assert torch.equal(layer.mlp.down_proj.bias, torch.zeros(32))
    assert abs(model.embed_positions.table.weight.std().item() - 0.02) < 2e-3
    assert abs(layer.mlp.down_proj.weight.std().item() - 0.02 / 4**0.5) < 1e-3


@pytest.mark.parametrize("change", [{"gated_mlp": True}, {"learned_positions": False}, {"num_key_value_heads": 3}])
def test_refuses_what_it_has_not(change: dict[str, int]) -> None:
    with pytest.raises(ModelError, match=f"model.shape.{next(iter(change))} is"):
        PART.build(replace(SHAPE, **change))
