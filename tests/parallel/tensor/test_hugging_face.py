"""A model of transformers, its own code untouched: keyword arguments, its own loss, its own views of heads."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from hybrid_strategy.parallel.tensor.apply import apply_tensor_parallel
from hybrid_strategy.spec.parallel_plan import ParallelPlan
from tests.support.collectives import CountCollectives
from tests.support.ranks import run_ranks

pytest.importorskip("transformers")

PLAN = ParallelPlan(
    tensor={
        "model.embed_tokens": "vocab_embedding",
        "model.layers.*.self_attn": "replicate_input",
        **{f"model.layers.*.self_attn.{name}_proj": "colwise" for name in "qkv"},
        "model.layers.*.self_attn.o_proj": "rowwise",
        "model.layers.*.mlp": "replicate_input",
        "model.layers.*.mlp.gate_proj": "colwise",
        "model.layers.*.mlp.up_proj": "colwise",
        "model.layers.*.mlp.down_proj": "rowwise",
        "lm_head": "vocab_head",
    },
    heads={"num_attention_heads": 4, "num_key_value_heads": 2},
)


def build() -> torch.nn.Module:
    """Qwen3: norms of queries and keys stand inside the region."""
    import transformers

    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=22,
        vocab_size=35,
        tie_word_embeddings=True,
        use_cache=False,
    )
    return transformers.Qwen3ForCausalLM(config).double()


def check_parity() -> None:
    whole, model = build(), build()
    shards = apply_tensor_parallel(model, PLAN, group=dist.group.WORLD, rank=dist.get_rank(), size=dist.get_world_size())
    ids = torch.randint(0, 35, (2, 8), generator=torch.Generator().manual_seed(1))
    expected = whole(input_ids=ids, labels=ids)
    with CountCollectives() as called:
        got = model(input_ids=ids, labels=ids)
    assert dict(called.counts) == {"all_reduce": 1 + 2 * 2, "all_gather_into_tensor": 1}
    torch.testing.assert_close(got.loss, expected.loss, rtol=1e-6, atol=0)  # transformers computes it in float32
    torch.testing.assert_close(F.log_softmax(got.logits, -1), F.log_softmax(expected.logits, -1), rtol=1e-12, atol=1e-12)
    for output in (expected, got):
        output.logits.square().mean().backward()
    for name, parameter in model.named_parameters():
        if shards[name].partial_gradient:
            dist.all_reduce(parameter.grad)
        assert torch.allclose(parameter.grad, shards[name].of(whole.get_parameter(name).grad), rtol=1e-11, atol=1e-13), name


def test_qwen3() -> None:
    run_ranks(check_parity, 2)
