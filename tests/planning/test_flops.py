from __future__ import annotations

import pytest

from hybrid_strategy.planning.flops import (
    MODEL_FLOPS,
    FlopConvention,
    forward_flops_per_token,
    matmul_parameters,
    recompute_flops_per_token,
    step_flops,
    training_flops_per_token,
)
from hybrid_strategy.spec.model_shape import ModelShape

GPT = ModelShape(12288, 96, 96, 49152, 51200, 2048, gated_mlp=False, tied_embeddings=True)
LLAMA = ModelShape(8192, 80, 64, 28672, 128256, 8192, num_key_value_heads=8)


def test_products_are_all_parameters_but_norms_and_look_up() -> None:
    norms = (2 * LLAMA.num_layers + 1) * LLAMA.hidden_size
    assert matmul_parameters(LLAMA) == LLAMA.num_parameters - LLAMA.embedding_parameters - norms


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_megatron_closed_forms(recompute: str) -> None:
    """arXiv:2205.05198 appendix A: 72 B L s h^2 (1 + s/6h + V/12Lh), s/3h with selective, 96 (... + V/16Lh) with full."""
    batch, s, layers, h, v = 64, 2048, 96, 12288, 51200
    closed = {
        "none": 72 * batch * layers * s * h * h * (1 + s / (6 * h) + v / (12 * layers * h)),
        "selective": 72 * batch * layers * s * h * h * (1 + s / (6 * h) + s / (18 * h) + v / (12 * layers * h)),
        "full": 96 * batch * layers * s * h * h * (1 + s / (6 * h) + v / (16 * layers * h)),
    }
    assert step_flops(GPT, batch, FlopConvention(recompute=recompute)) == pytest.approx(closed[recompute], rel=1e-9)


def test_conventions_differ_as_they_should() -> None:
    full = training_flops_per_token(LLAMA)
    scores = 12 * LLAMA.num_layers * LLAMA.hidden_size * LLAMA.sequence_length
    assert full - training_flops_per_token(LLAMA, FlopConvention(causal=True)) == pytest.approx(scores / 2)
    everything = training_flops_per_token(LLAMA, FlopConvention(all_parameters=True)) - full
    assert everything == pytest.approx(6 * (LLAMA.num_parameters - matmul_parameters(LLAMA)))
    assert training_flops_per_token(LLAMA, MODEL_FLOPS) == pytest.approx(3 * forward_flops_per_token(LLAMA))


def test_full_recomputation_repeats_a_third_less_the_head() -> None:
    again = recompute_flops_per_token(GPT, "full")
    head = 2 * GPT.vocab_size * GPT.hidden_size
    assert again == pytest.approx(forward_flops_per_token(GPT) - head)
    assert recompute_flops_per_token(GPT, "none") == 0
