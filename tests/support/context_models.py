"""Users' own models under context parallelism, and one training step of them on the ranks of a pool."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from hybrid_strategy.distributed.groups import build_groups
from hybrid_strategy.parallel.shell import Shell, whole_of
from hybrid_strategy.parallelize import parallelize
from hybrid_strategy.planning.layouts import resolve_layout
from hybrid_strategy.spec.parallel_plan import ParallelPlan
from hybrid_strategy.strategy.target import find_plan

WIDTH, HEADS, VOCAB, LENGTH = 32, 4, 64, 16


class Attention(nn.Module):
    """`kind` says how positions meet: `causal`, `both` ways, under a `mask`, or in ways that a part of a sequence cannot bear."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.qkv, self.out = kind, nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        q, k, v = (each.unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        return self.out(self._mixed(q, k, v, mask).transpose(1, 2).flatten(2))

    def _mixed(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        if self.kind == "written out":
            scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
            return scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), float("-inf")).softmax(-1) @ v
        if self.kind == "own positions":
            angles = torch.arange(q.shape[2]).unsqueeze(1) * torch.linspace(0.1, 1.0, q.shape[-1])
            q, k = q * angles.cos(), k * angles.cos()
        if self.kind == "own mask":
            mask = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril()
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None and self.kind != "both")


class Block(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.attention = Attention(kind)
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        self.convolution = nn.Conv1d(WIDTH, WIDTH, 3, padding=1) if kind == "convolution" else None

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x + self.attention(self.norm1(x), mask)
        if self.convolution is not None:
            x = x + self.convolution(x.transpose(1, 2)).transpose(1, 2)
        return x + self.mlp(self.norm2(x))


class Nano(nn.Module):
    """Tells nothing of itself: positions, dropout, the last norm and a tied head stand between or after its blocks."""

    def __init__(self, kind: str = "causal") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.tokens, self.positions = nn.Embedding(VOCAB, WIDTH), nn.Embedding(2 * LENGTH, WIDTH)
        self.dropout, self.norm = nn.Dropout(0.0), nn.LayerNorm(WIDTH)
        self.blocks = nn.ModuleList(Block(kind) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        rows, length = ids.shape
        x = self.dropout(self.tokens(ids) + self.positions(torch.arange(length)))
        mask = None
        if self.kind == "mask":
            padding = torch.arange(length) < length - torch.arange(rows).unsqueeze(1)
            mask = torch.ones(length, length, dtype=torch.bool).tril() & padding[:, None, None]
        for block in self.blocks:
            x = 0.9 * block(x, mask) + 0.1
        return self.head(self.norm(x))


class PlannedNano(Nano):
    """Every module is a unit but the positions."""

    def parallel_plan(self) -> ParallelPlan:
        return ParallelPlan(units=("tokens", "blocks.*", "norm", "head"))


class TorchEncoder(nn.Module):
    """torch's own layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        options: dict[str, Any] = {"dropout": 0.0, "batch_first": True, "norm_first": True}
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, **options) for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Holder(nn.Module):
    """What a LightningModule is to `parallelize`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


Loss = Callable[[nn.Module, Tensor], Tensor]


@dataclass(frozen=True)
class Outcome:
    """The loss, the gradients by name, and the logits in evaluation."""

    loss: float
    gradients: dict[str, Tensor]
    logits: Tensor


def tokens(rows: int = 4, length: int = LENGTH) -> Tensor:
    return torch.randint(0, VOCAB, (rows, length), generator=torch.Generator().manual_seed(1))


def plain(tensor: Tensor) -> Tensor:
    """The whole of a tensor that may be split."""
    return whole_of(tensor) if isinstance(tensor, Shell) else tensor


def one_step(build: Callable[[], nn.Module], loss_of: Loss, size: int, **layout: Any) -> Outcome:
    """Forward and backward of one batch with `size` context-parallel ranks; a function of a rank."""
    sizes = resolve_layout(world_size=dist.get_world_size(), context_parallel_size=size, **layout)
    groups = build_groups(sizes, torch.device("cpu"))
    holder = Holder(build())
    made = parallelize(holder, "model", find_plan(holder, "model", None), groups, torch.device("cpu"))
    made.sharding.begin()
    loss = loss_of(holder.model, tokens())
    (loss / size).backward()
    made.sharding.after_backward(made.slots)
    with torch.no_grad():
        logits = holder.eval().model(tokens())
    made.sharding.end()
    made.sharding.take()
    made.sharding.hand_over(1.0)
    made.sharding.reduce()
    gradients = {slot.name: made.sharding.optimizer_parameter(slot).grad for slot in made.slots}
    return Outcome(loss.item(), {name: each for name, each in gradients.items() if each is not None}, plain(logits))
