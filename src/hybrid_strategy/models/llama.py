"""Family `llama`: RMSNorm, rotary positions, grouped-query attention, SwiGLU. Names are those of Hugging Face's `LlamaModel`.

Sizes in comments: b batch, s sequence, h hidden, n query heads, k key/value heads, d head size, f MLP. Under tensor
parallelism the layers hold n/t, k/t and f/t of them, so views leave the number of heads to the tensor's own width.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hybrid_strategy.models import _decoder
from hybrid_strategy.models._hf_llama import EXCHANGE
from hybrid_strategy.spec.model_shape import ModelShape
from hybrid_strategy.spec.parallel_plan import ParallelPlan


def rotary_tables(positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary embedding (arXiv:2104.09864, in the half-split form of Hugging Face's weights).

    Args:
        positions: `[s]` or `[b, s]`.

    Returns:
        Two tables `[s, d]` or `[b, 1, s, d]`, computed in float32.
    """
    frequencies = theta ** (-torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim)
    angles = positions.unsqueeze(-1) * frequencies  # [.., s, d/2]
    if positions.dim() == 2:
        angles = angles.unsqueeze(1)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns the pairs `(i, i + d/2)` of the last dimension by their angles; `x`: `[b, heads, s, d]`."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Attention(nn.Module):
    """Causal grouped-query attention: `[b, s, h]` -> `[b, s, h]`."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.head_dim = shape.head_size
        query, key_value = shape.num_attention_heads * shape.head_size, shape.kv_heads * shape.head_size
        self.q_proj = nn.Linear(shape.hidden_size, query, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, key_value, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, key_value, bias=False)
        self.o_proj = nn.Linear(query, shape.hidden_size, bias=False)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        query, key, value = (self._heads(project(hidden)) for project in (self.q_proj, self.k_proj, self.v_proj))
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        grouped = query.shape[1] != key.shape[1]
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)
        return cast(Tensor, self.o_proj(mixed.transpose(1, 2).flatten(2)))

    def _heads(self, x: Tensor) -> Tensor:
        """`[b, s, heads * d]` -> `[b, heads, s, d]`."""
        return x.view(x.shape[0], x.shape[1], -1, self.head_dim).transpose(1, 2)


class MLP(nn.Module):
    """SwiGLU (arXiv:2002.05202): `[b, s, h]` -> `[b, s, h]`."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return cast(Tensor, self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden)))


class DecoderLayer(nn.Module):
    """One block; `hidden`: `[b, s, h]`, under sequence parallelism this rank's `[b, s/t, h]`."""

    def __init__(self, shape: ModelShape, norm_eps: float) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = MLP(shape)
        self.input_layernorm = nn.RMSNorm(shape.hidden_size, eps=norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden_size, eps=norm_eps)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), cos, sin)
        return cast(Tensor, hidden + self.mlp(self.post_attention_layernorm(hidden)))


class Llama(nn.Module):
    """The model: token ids `[b, s]` -> logits `[b, s, vocab]`.

    `forward` calls `embed_tokens`, every layer, `norm` and `lm_head` in this order, each with the hidden state as its first
    argument, and looks at nothing inside them: any of them may live on another pipeline stage.
    """

    def __init__(self, shape: ModelShape, rope_theta: float = 10000.0, norm_eps: float = 1e-5) -> None:
        super().__init__()
        _decoder.check_shape(shape, "llama")
        self.shape, self.rope_theta = shape, rope_theta
        self.options = {"rope_theta": rope_theta, "norm_eps": norm_eps}
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(shape, norm_eps) for _ in range(shape.num_layers))
        self.norm = nn.RMSNorm(shape.hidden_size, eps=norm_eps)
        self.lm_head = nn.Linear(shape.hidden_size, shape.vocab_size, bias=False)
        if shape.tied_embeddings:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """Logits `[b, s, vocab]` of `input_ids` `[b, s]`; `position_ids` `[s]` or `[b, s]`, default 0, 1, 2 and so on."""
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)
        hidden = self.embed_tokens(input_ids)
        cos, sin = rotary_tables(position_ids, self.shape.head_size, self.rope_theta, hidden.dtype)
        for layer in self.layers:
            hidden = layer(hidden, cos, sin)
        return cast(Tensor, self.lm_head(self.norm(hidden)))

    def parallel_plan(self) -> ParallelPlan:
        """Two sub-blocks a layer, each with one point where its input becomes whole."""
        return ParallelPlan(
            units=("embed_tokens", "layers.*", "norm", "lm_head"),
            tensor={
                "embed_tokens": "vocab_embedding",
                "layers.*.input_layernorm": "sequence_norm",
                "layers.*.self_attn": "replicate_input",
                "layers.*.self_attn.q_proj": "colwise",
                "layers.*.self_attn.k_proj": "colwise",
                "layers.*.self_attn.v_proj": "colwise",
                "layers.*.self_attn.o_proj": "rowwise",
                "layers.*.post_attention_layernorm": "sequence_norm",
                "layers.*.mlp": "replicate_input",
                "layers.*.mlp.gate_proj": "colwise",
                "layers.*.mlp.up_proj": "colwise",
                "layers.*.mlp.down_proj": "rowwise",
                "norm": "sequence_norm",
                "lm_head": "vocab_head",
            },
            checkpoint_units=("layers.*",),
            tied=(("embed_tokens.weight", "lm_head.weight"),) if self.shape.tied_embeddings else (),
            heads={"num_attention_heads": self.shape.num_attention_heads, "num_key_value_heads": self.shape.kv_heads},
        )

    def init_parameter(self, name: str, tensor: Tensor, generator: torch.Generator) -> None:
        """Fills the whole parameter `name` in place."""
        _decoder.init_parameter(name, tensor, generator, self.shape.num_layers, residual=("o_proj", "down_proj"))


class LlamaFamily:
    """The door of the registry."""

    name = "llama"
    exchange = EXCHANGE
    tiny = ModelShape(16, 3, 4, 22, 67, 8, num_key_value_heads=2)

    def build(self, shape: ModelShape, **options: Any) -> nn.Module:
        return Llama(shape, **options)

    def matches(self, module: nn.Module) -> bool:
        return isinstance(module, Llama)


PART = LlamaFamily()
