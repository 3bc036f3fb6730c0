"""Floating-point operations of a transformer, with the convention said each time.

A published MFU means nothing without its convention: whether attention counts in full or by its causal half, whether all
parameters count or those in products, whether recomputation counts (HFU) or not (MFU). They move it by 5-15 %.
"""

from __future__ import annotations

from dataclasses import dataclass

from hybrid_strategy.spec.model_shape import ModelShape


@dataclass(frozen=True)
class FlopConvention:
    """What is counted.

    Attributes:
        causal: attention scores above the diagonal are not counted (half of 12 L h s).
        all_parameters: every parameter counts as if it were in a product: norms, positions, the input embedding too.
        recompute: `none` (MFU), or the activation checkpoint whose extra forward passes count too (HFU).
    """

    causal: bool = False
    all_parameters: bool = False
    recompute: str = "none"


MODEL_FLOPS = FlopConvention()
"""Full attention, no look-up, no recomputation: torchtitan, nanotron, llm-foundry, NeMo tables."""


def matmul_parameters(shape: ModelShape) -> int:
    """Weights that take part in a product: blocks without norms and biases, and the output head (tied or not).

    >>> llama3_8b = ModelShape(4096, 32, 32, 14336, 128256, 8192, num_key_value_heads=8)
    >>> matmul_parameters(llama3_8b)
    7504658432
    """
    return shape.num_layers * layer_matmul_parameters(shape) + shape.vocab_size * shape.hidden_size


def layer_matmul_parameters(shape: ModelShape) -> int:
    """Weights of one block's products: 2 h q + 2 h kv + 3 h f (gated) or 2 h f."""
    h = shape.hidden_size
    attention = 2 * h * (shape.num_attention_heads + shape.kv_heads) * shape.head_size
    return attention + (3 if shape.gated_mlp else 2) * h * shape.intermediate_size


def attention_score_flops(shape: ModelShape, tokens: float, context: float = 0.0) -> float:
    """Forward FLOPs of the two score products of one block over `tokens` tokens: 4 q s a token, full attention.

    Source: arXiv:2205.05198 appendix A (4 b s^2 h a layer).
    """
    return 4.0 * tokens * (context or shape.sequence_length) * shape.num_attention_heads * shape.head_size


def forward_flops_per_token(shape: ModelShape, convention: FlopConvention = MODEL_FLOPS) -> float:
    """FLOPs of one forward pass over one token: 2 N_m + 4 L q s (2 L q s by the causal half)."""
    scores = shape.num_layers * attention_score_flops(shape, 1) * (0.5 if convention.causal else 1.0)
    return 2.0 * (shape.num_parameters if convention.all_parameters else matmul_parameters(shape)) + scores


def recompute_flops_per_token(shape: ModelShape, recompute: str, causal: bool = False) -> float:
    """FLOPs a token that recomputation adds: the blocks' forward under `full`, the score products under `selective`.

    Source: arXiv:2205.05198 appendix A. The head is never recomputed.
    """
    scores = shape.num_layers * attention_score_flops(shape, 1) * (0.5 if causal else 1.0)
    if recompute == "full":
        return 2.0 * shape.num_layers * layer_matmul_parameters(shape) + scores
    return scores if recompute == "selective" else 0.0


def training_flops_per_token(shape: ModelShape, convention: FlopConvention = MODEL_FLOPS) -> float:
    """FLOPs of forward and backward over one token: three forward passes, and the recomputation where it counts.

    Sources: torchtitan d4c86e375^ torchtitan/utils.py:274-289 (6 N + 12 L h s), NeMo 8cfedd72 nemo/utils/flops_formulas.py.
    NeMo's tables state 46.1 GFLOP a token for Llama 2 7B at 4,096 and 57.9 for Llama 3 8B at 8,192:

    >>> llama2_7b = ModelShape(4096, 32, 32, 11008, 32000, 4096)
    >>> llama3_8b = ModelShape(4096, 32, 32, 14336, 128256, 8192, num_key_value_heads=8)
    >>> [round(training_flops_per_token(shape) / 1e9, 1) for shape in (llama2_7b, llama3_8b)]
    [46.1, 57.9]
    """
    recompute = recompute_flops_per_token(shape, convention.recompute, convention.causal)
    return 3.0 * forward_flops_per_token(shape, convention) + recompute


def step_flops(shape: ModelShape, global_batch_size: int, convention: FlopConvention = MODEL_FLOPS) -> float:
    """FLOPs of one optimizer step of the whole run.

    Megatron's closed form for f = 4h and a tied head, 96 B s L h^2 (1 + s/6h + V/16Lh) under full recomputation
    (arXiv:2104.04473 eq. 3), is the same number:

    >>> gpt = ModelShape(12288, 96, 96, 49152, 51200, 2048, gated_mlp=False, tied_embeddings=True)
    >>> ours = step_flops(gpt, 1536, FlopConvention(recompute="full"))
    >>> B, s, L, h, V = 1536, 2048, 96, 12288, 51200
    >>> round(ours / (96 * B * s * L * h * h * (1 + s / (6 * h) + V / (16 * L * h))), 12)
    1.0
    """
    return global_batch_size * shape.sequence_length * training_flops_per_token(shape, convention)


def flops_utilization(flops_per_token: float, tokens_per_second_per_gpu: float, peak_flops: float) -> float:
    """MFU or HFU, by the convention that `flops_per_token` was counted with.

    >>> llama3_8b = ModelShape(4096, 32, 32, 14336, 128256, 8192, num_key_value_heads=8)
    >>> round(flops_utilization(training_flops_per_token(llama3_8b), 2904, 312e12), 3)
    0.539
    """
    return flops_per_token * tokens_per_second_per_gpu / peak_flops
