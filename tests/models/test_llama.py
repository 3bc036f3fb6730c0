"""The llama family: numbers of Hugging Face's implementation, the right parameter count, a plan that fits it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hybrid_strategy.errors import ModelError
from hybrid_strategy.models.llama import PART, Llama
from hybrid_strategy.spec.model_shape import ModelShape

SHAPE = ModelShape(
    hidden_size=32,
    num_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=48,
    vocab_size=65,
    sequence_length=16,
)


def filled(shape: ModelShape = SHAPE, **options: float) -> Llama:
    model = Llama(shape, **options)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data.normal_(0.0, 0.2, generator=generator)
    return model


@pytest.mark.parametrize("position_ids", [None, torch.arange(3, 19), torch.arange(32).view(2, 16) % 11])
def test_logits_of_hugging_face(position_ids: torch.Tensor | None) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        vocab_size=65,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
        attn_implementation="sdpa",
    )
    theirs, ours = transformers.LlamaForCausalLM(config), filled(rope_theta=5000.0)
    weights = {key if key.startswith("lm_head") else f"model.{key}": value for key, value in ours.state_dict().items()}
    theirs.load_state_dict(weights, strict=True)
    ids = torch.randint(0, 65, (2, 16), generator=torch.Generator().manual_seed(1))
    rows = None if position_ids is None else position_ids.expand(2, 16)
    expected = theirs(
        input_ids=ids, position_ids=rows, attention_mask=None if rows is None else torch.ones(2, 1, 16, 16).tril().bool()
    )
    torch.testing.assert_close(ours(ids, position_ids), expected.logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tied", [False, True])
def test_parameter_count_is_the_shapes(tied: bool) -> None:
    shape = replace(SHAPE, tied_embeddings=tied, head_dim=16)
    model = PART.build(shape)
    assert PART.matches(model)
    assert sum(each.numel() for each in model.parameters()) == shape.num_parameters
    assert (model.lm_head.weight is model.embed_tokens.weight) == tied
    assert bool(model.parallel_plan().tied) == tied


def test_builds_on_meta_without_buffers() -> None:
    with torch.device("meta"):
        model = PART.build(SHAPE)
    assert all(each.is_meta for each in model.parameters())
    assert not list(model.buffers())


def test_is_causal() -> None:
    model, ids = filled(), torch.arange(16).view(1, 16)
    changed = ids.clone()
    changed[0, 9:] = 7
    torch.testing.assert_close(model(ids)[:, :9], model(changed)[:, :9])
    assert not torch.allclose(model(ids)[:, 9:], model(changed)[:, 9:])


@pytest.mark.parametrize("change", [{"bias": True}, {"learned_positions": True}, {"num_key_value_heads": 3}])
def test_refuses_what_it_has_not(change: dict[str, int]) -> None:
    with pytest.raises(ModelError, match=f"model.shape.{next(iter(change))} is"):
        PART.build(replace(SHAPE, **change))


def test_initial_values() -> None:
    model = Llama(SHAPE)
    for name, parameter in model.named_parameters():
        model.init_parameter(name, parameter.data, torch.Generator().manual_seed(3))
    assert torch.equal(model.norm.weight, torch.ones(32))
    layer = model.layers[0]
    assert abs(layer.self_attn.q_proj.weight.std().item() - 0.02) < 2e-3
    assert abs(layer.self_attn.o_proj.weight.std().item() - 0.02 / 4**0.5) < 1e-3
    assert abs(layer.mlp.down_proj.weight.std().item() - 0.02 / 4**0.5) < 1e-3
