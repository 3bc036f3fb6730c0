"""Family `gpt`: LayerNorm, learned positions, biases, GELU, dropout, as in GPT-2 and GPT-3; query, key and value kept apart.

Sizes in comments: b batch, s sequence, h hidden, d head size. Under tensor parallelism the layers hold their share of the heads,
so views leave the number of heads to the tensor's own width.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hybrid_strategy.models import _decoder
from hybrid_strategy.models._hf_gpt2 import EXCHANGE
from hybrid_strategy.spec.model_shape import ModelShape
from hybrid_strategy.spec.parallel_plan import ParallelPlan


class LearnedPositions(nn.Module):
    """Adds a learned vector for each position, then drops out: `[b, s, h]` -> `[b, s, h]`.

    Under sequence parallelism `hidden` is this rank's part `[b, s/t, h]`, and `table` gives the same part.
    """

    def __init__(self, shape: ModelShape, dropout: float) -> None:
        super().__init__()
        self.table = nn.Embedding(shape.sequence_length, shape.hidden_size)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: Tensor, position_ids: Tensor) -> Tensor:
        """`position_ids`: `[1, s]` or `[b, s]`."""
        return cast(Tensor, self.dropout(hidden + self.table(position_ids)))


class Attention(nn.Module):
    """Causal grouped-query attention: `[b, s, h]` -> `[b, s, h]`."""

    def __init__(self, shape: ModelShape, dropout: float) -> None:
        super().__init__()
        self.head_dim, self.dropout = shape.head_size, dropout
        query, key_value = shape.num_attention_heads * shape.head_size, shape.kv_heads * shape.head_size
        self.q_proj = nn.Linear(shape.hidden_size, query, bias=shape.bias)
        self.k_proj = nn.Linear(shape.hidden_size, key_value, bias=shape.bias)
        self.v_proj = nn.Linear(shape.hidden_size, key_value, bias=shape.bias)
        self.o_proj = nn.Linear(query, shape.hidden_size, bias=shape.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        query, key, value = (self._heads(project(hidden)) for project in (self.q_proj, self.k_proj, self.v_proj))
        mixed = F.scaled_dot_product_attention(
            query,
            key,
            value,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=True,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return cast(Tensor, self.o_proj(mixed.transpose(1, 2).flatten(2)))

    def _heads(self, x: Tensor) -> Tensor:
        """`[b, s, heads * d]` -> `[b, heads, s, d]`."""
        return x.view(x.shape[0], x.shape[1], -1, self.head_dim).transpose(1, 2)


class MLP(nn.Module):
    """GELU in its tanh form (arXiv:1606.08415): `[b, s, h]` -> `[b, s, h]`."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=shape.bias)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=shape.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        return cast(Tensor, self.down_proj(F.gelu(self.up_proj(hidden), approximate="tanh")))


class DecoderLayer(nn.Module):
    """One pre-norm block; `hidden`: `[b, s, h]`, under sequence parallelism this rank's `[b, s/t, h]`."""

    def __init__(self, shape: ModelShape, dropout: float, norm_eps: float) -> None:
        super().__init__()
        self.self_attn = Attention(shape, dropout)
        self.mlp = MLP(shape)
        self.input_layernorm = nn.LayerNorm(shape.hidden_size, eps=norm_eps, bias=shape.bias)
        self.post_attention_layernorm = nn.LayerNorm(shape.hidden_size, eps=norm_eps, bias=shape.bias)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.dropout(self.self_attn(self.input_layernorm(hidden)))
        return cast(Tensor, hidden + self.dropout(self.mlp(self.post_attention_layernorm(hidden))))


class GPT(nn.Module):
    """The model: token ids `[b, s]` -> logits `[b, s, vocab]`.

    `forward` calls `embed_tokens`, `embed_positions`, every layer, `norm` and `lm_head` in this order and looks at nothing inside
    them: any of them may live on another pipeline stage.
    """

    def __init__(self, shape: ModelShape, dropout: float = 0.0, norm_eps: float = 1e-5) -> None:
        super().__init__()
        _decoder.check_shape(shape, "gpt")
        self.shape, self.options = shape, {"dropout": dropout, "norm_eps": norm_eps}
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.embed_positions = LearnedPositions(shape, dropout)
        self.layers = nn.ModuleList(DecoderLayer(shape, dropout, norm_eps) for _ in range(shape.num_layers))
        self.norm = nn.LayerNorm(shape.hidden_size, eps=norm_eps, bias=shape.bias)
        self.lm_head = nn.Linear(shape.hidden_size, shape.vocab_size, bias=False)
        if shape.tied_embeddings:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """Logits `[b, s, vocab]` of `input_ids` `[b, s]`; `position_ids` `[s]` or `[b, s]`, default 0, 1, 2 and so on."""
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)
        rows = position_ids if position_ids.dim() == 2 else position_ids.unsqueeze(0)
        hidden = self.embed_positions(self.embed_tokens(input_ids), rows)
        for layer in self.layers:
            hidden = layer(hidden)
        return cast(Tensor, self.lm_head(self.norm(hidden)))

    def parallel_plan(self) -> ParallelPlan:
        """Two sub-blocks a layer, each with one point where its input becomes whole."""
        return ParallelPlan(
            units=("embed_tokens", "embed_positions", "layers.*", "norm", "lm_head"),
            tensor={
                "embed_tokens": "vocab_embedding",
                "embed_positions.table": "sequence_split",
                "layers.*.input_layernorm": "sequence_norm",
                "layers.*.self_attn": "replicate_input",
                "layers.*.self_attn.q_proj": "colwise",
                "layers.*.self_attn.k_proj": "colwise",
                "layers.*.self_attn.v_proj": "colwise",
                "layers.*.self_attn.o_proj": "rowwise",
                "layers.*.post_attention_layernorm": "sequence_norm",
                "layers.*.mlp": "replicate_input",
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


class GPTFamily:
    """The door of the registry."""

    name = "gpt"
    exchange = EXCHANGE
    tiny = ModelShape(16, 3, 4, 22, 67, 8, 2, family="gpt", gated_mlp=False, bias=True, learned_positions=True)

    def build(self, shape: ModelShape, **options: Any) -> nn.Module:
        return GPT(shape, **options)

    def matches(self, module: nn.Module) -> bool:
        return isinstance(module, GPT)


PART = GPTFamily()
