"""Models, data and the training loop that the tests of tensor parallelism run on one process and on slices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from hybrid_strategy.models.gpt import GPT
from hybrid_strategy.models.llama import Llama
from hybrid_strategy.parallel.tensor.apply import TensorShard
from hybrid_strategy.spec.model_shape import ModelShape
from hybrid_strategy.spec.parallel_plan import ParallelPlan


class BiasedAttention(nn.Module):
    """Biases everywhere, and a norm of queries that is a replica inside the region."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.head = hidden // heads
        self.q, self.k, self.v, self.o = (nn.Linear(hidden, hidden) for _ in range(4))
        self.q_norm = nn.RMSNorm(self.head)

    def forward(self, *, hidden: Tensor) -> Tensor:
        q, k, v = (each(hidden).unflatten(-1, (-1, self.head)).transpose(1, 2) for each in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(self.q_norm(q), k, v, is_causal=True)
        return self.o(mixed.transpose(1, 2).flatten(2))


class BiasedBlock(nn.Module):
    """`up` and `down` have no sub-block of their own; no rule names `scale`."""

    def __init__(self, hidden: int, heads: int, mlp: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(hidden))
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.attention = BiasedAttention(hidden, heads)
        self.up, self.down = nn.Linear(hidden, mlp), nn.Linear(mlp, hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(hidden=self.norm1(x)) * self.scale
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Biased(nn.Module):
    """A user's own model: odd names, biases, an odd MLP size, a biased head, a padding token, tied or not."""

    def __init__(self, vocab: int, tied: bool) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, 16, padding_idx=1)
        self.blocks = nn.ModuleList(BiasedBlock(16, 4, 27) for _ in range(2))
        self.last = nn.LayerNorm(16)
        self.head = nn.Linear(16, vocab)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.last(x))

    def parallel_plan(self) -> ParallelPlan:
        return ParallelPlan(
            tensor={
                "tokens": "vocab_embedding",
                "blocks.*.norm1": "sequence_norm",
                "blocks.*.attention": "replicate_input",
                **{f"blocks.*.attention.{name}": "colwise" for name in "qkv"},
                "blocks.*.attention.o": "rowwise",
                "blocks.*.up": "colwise",
                "blocks.*.down": "rowwise",
                "head": "vocab_head",
            },
            heads={"heads": 4},
        )


@dataclass(frozen=True)
class Case:
    """One model and one way to run it."""

    model: str = "llama"
    vocab: int = 64
    tied: bool = False
    dtype: torch.dtype = torch.float64
    autocast: bool = False
    optimizer: str = "foreach"

    def build(self) -> nn.Module:
        torch.manual_seed(0)
        if self.model == "llama":
            shape = ModelShape(16, 2, 4, 20, self.vocab, 8, num_key_value_heads=4, tied_embeddings=self.tied)
            model: nn.Module = Llama(shape)
        elif self.model == "gpt":
            sizes = {"tied_embeddings": self.tied, "gated_mlp": False, "bias": True, "learned_positions": True}
            model = GPT(ModelShape(16, 2, 4, 20, self.vocab, 8, **sizes))
        else:
            model = Biased(self.vocab, self.tied)
        generator = torch.Generator().manual_seed(1)
        for parameter in model.parameters():
            parameter.data.normal_(0.0, 0.3, generator=generator)
        return model.to(self.dtype)

    def batch(self) -> tuple[Tensor, Tensor]:
        """Ids and labels `[3, 8]`; a few labels are ignored."""
        generator = torch.Generator().manual_seed(2)
        ids, labels = torch.randint(0, self.vocab, (2, 3, 8), generator=generator)
        labels[0, :2] = -100
        return ids, labels


@dataclass
class Outcome:
    """What a rank saw: the losses, the first step's gradients and the last weights, by name."""

    losses: list[Tensor]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]


def train(case: Case, model: nn.Module, shards: dict[str, TensorShard] | None = None, steps: int = 3) -> Outcome:
    """`steps` steps of AdamW; sums the gradients that are partial as the strategy does."""
    flags: dict[str, Any] = {case.optimizer: True} if case.optimizer != "plain" else {"foreach": False}
    # the exact gradient of a key bias is 0: a larger eps keeps Adam from blowing its rounding error up to a full step
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, eps=1e-4, **flags)
    ids, labels = case.batch()
    outcome = Outcome([], {}, {})
    for _ in range(steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=case.autocast):
            loss = F.cross_entropy(model(ids).flatten(0, 1), labels.flatten())
        loss.backward()
        for name, parameter in model.named_parameters():
            if shards is not None and shards[name].partial_gradient:
                dist.all_reduce(parameter.grad)
        outcome.losses.append(loss.detach())
        outcome.gradients = outcome.gradients or {name: each.grad.clone() for name, each in model.named_parameters()}
        optimizer.step()
    outcome.weights = {name: each.detach().clone() for name, each in model.named_parameters()}
    return outcome
