"""Plans that leave features split where all of them are needed: refused by name on every rank, and what is like it is right."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hybrid_strategy import ParallelPlan
from tests.contract import own_models
from tests.contract.items import Item, compare_item
from tests.contract.layouts import LAYOUTS
from tests.contract.model_items import _train

WIDTH, VOCAB = own_models.WIDTH, own_models.VOCAB


class SplitHead(own_models.Transformer):
    plan = ParallelPlan(units=own_models.Transformer.plan.units, tensor={**own_models.Transformer.plan.tensor, "head": "colwise"})


class Normed(own_models.Attention):
    """Norms queries over the whole width, by a weight (OLMo 2) or without one."""

    def __init__(self, weight: bool = False) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH)) if weight else 1.0

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        query = self.query(x)
        query = self.scale * query * torch.rsqrt(query.pow(2).mean(-1, keepdim=True) + 1e-6)
        mixed = F.scaled_dot_product_attention(*(_heads(each) for each in (query, self.key(x), self.value(x))))
        return self.out(mixed.transpose(1, 2).flatten(2))


class HeadNormed(Normed):
    """Norms every head by itself, and knows attention by its products."""

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        query, key, value = (_heads(layer(x)) for layer in (self.query, self.key, self.value))
        query = query * torch.rsqrt(query.pow(2).mean(-1, keepdim=True) + 1e-6)
        first, second = query[..., : WIDTH // 4], query[..., WIDTH // 4 :]
        shares = torch.softmax(torch.cat([-second, first], -1) @ key.transpose(-1, -2) / 2.0, -1, dtype=torch.float32)
        return self.out((shares.to(value) @ value).transpose(1, 2).reshape(*x.shape[:2], -1))


class Turned(Normed):
    """Turns pairs of a head, then norms and cuts the head: of one head a rank has as many features as of all of its heads."""

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        query, key, value = (_heads(layer(x)) for layer in (self.query, self.key, self.value))
        query = query + torch.stack((-query[..., 1::2], query[..., ::2]), -1).flatten(-2)
        first, second = (query * torch.rsqrt(query.pow(2).mean(-1, keepdim=True) + 1e-6)).chunk(2, -1)
        mixed = F.scaled_dot_product_attention(torch.cat([-second, first], -1), key, value)
        return self.out(mixed.transpose(1, 2).flatten(2))


class CountedHeads(Normed):
    """Knows how many heads there are, and not how wide they are: a rank would cut each into halves."""

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        parts = [
            layer(x).view(*x.shape[:2], own_models.HEADS, -1).transpose(1, 2) for layer in (self.query, self.key, self.value)
        ]
        return self.out(F.scaled_dot_product_attention(*parts).transpose(1, 2).flatten(2))


class HeadWeights(HeadNormed):
    """Has a weight for every head (Cohere), of which no rule says anything."""

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        query, key, value = (_heads(layer(x)) for layer in (self.query, self.key, self.value))
        weights = torch.diag_embed(self.scale.view(own_models.HEADS, -1))
        query = torch.bmm(query.transpose(0, 1).flatten(1, 2), weights).view(query.transpose(0, 1).shape).transpose(0, 1)
        return self.out(F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2))


class MixedNormed(Normed):
    """Norms what its heads have attended to, over the whole width."""

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        mixed = F.scaled_dot_product_attention(*(_heads(each(x)) for each in (self.query, self.key, self.value)))
        return self.out(F.normalize(mixed.transpose(1, 2).flatten(2), dim=-1))


class Fused(nn.Module):
    """A gate and what it lets through come out of one Linear."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 24), nn.Linear(12, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.up(x).chunk(2, -1)
        return self.down(F.silu(gate) * value)


def _heads(each: Tensor) -> Tensor:
    return each.unflatten(-1, (-1, WIDTH // own_models.HEADS)).transpose(1, 2)


def _with(attention: Any) -> type[nn.Module]:
    class Kind(own_models.Transformer):
        def __init__(self) -> None:
            super().__init__()
            for block in self.blocks:
                block.attention = attention()

    Kind.__name__ = getattr(attention, "__name__", "weighted")
    return Kind


class OtherWay(nn.Module):
    """Tries something that fails with all features as well, and goes the other way then."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x).transpose(0, 1)
        try:
            rows = hidden.view(-1, hidden.shape[-1])
        except RuntimeError:
            rows = hidden.reshape(-1, hidden.shape[-1])
        return self.down(F.gelu(rows).view(x.shape[1], x.shape[0], -1).transpose(0, 1))


class OtherHeads(Normed):
    """Tries something that works with all features only; of a share it would make other heads."""

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        parts = [_caught_heads(layer(x)) for layer in (self.query, self.key, self.value)]
        return self.out(F.scaled_dot_product_attention(*parts).transpose(1, 2).flatten(2))


class CaughtNorm(Normed):
    """Catches whatever a norm over the whole width says."""

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        query = self.query(x)
        with suppress(Exception):
            query = F.layer_norm(query, (WIDTH,))
        mixed = F.scaled_dot_product_attention(*(_heads(each) for each in (query, self.key(x), self.value(x))))
        return self.out(mixed.transpose(1, 2).flatten(2))


class CaughtLayer(Normed):
    """Catches what a layer says that is given a share."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        query = self.query(x)
        with suppress(Exception):
            query = self.norm(query)
        mixed = F.scaled_dot_product_attention(*(_heads(each) for each in (query, self.key(x), self.value(x))))
        return self.out(mixed.transpose(1, 2).flatten(2))


class DividedHeads(Normed):
    """Knows how many heads there are, and divides the width that it sees by them."""

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        parts = [layer(x) for layer in (self.query, self.key, self.value)]
        heads = [each.reshape(*x.shape[:2], own_models.HEADS, each.shape[-1] // own_models.HEADS) for each in parts]
        return self.out(F.scaled_dot_product_attention(*(each.transpose(1, 2) for each in heads)).transpose(1, 2).flatten(2))


def _caught_heads(each: Tensor) -> Tensor:
    try:
        return each.view(*each.shape[:2], own_models.HEADS, WIDTH // own_models.HEADS).transpose(1, 2)
    except Exception:
        return each.view(*each.shape[:2], -1, 2).transpose(1, 2)


class OtherWays(own_models.Transformer):
    plan = ParallelPlan(
        units=own_models.Transformer.plan.units, tensor={"blocks.*.mlp.up": "colwise", "blocks.*.mlp.down": "rowwise"}
    )

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.mlp = OtherWay()


class FusedTransformer(own_models.Transformer):
    plan = ParallelPlan(
        units=own_models.Transformer.plan.units, tensor={"blocks.*.mlp.up": "colwise", "blocks.*.mlp.down": "rowwise"}
    )

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.mlp = Fused()


class NoRowwise(own_models.Transformer):
    """A rule is forgotten."""

    plan = ParallelPlan(units=own_models.Transformer.plan.units, tensor={"blocks.*.attention.out": "colwise"})


def _fit(name: str, layout: str, folder: str = "") -> Any:
    return _train(KINDS[name], False, False, True, layout, folder)  # type: ignore[arg-type]


KINDS = {
    "split_head": SplitHead,
    "normed": _with(Normed),
    "weighted": _with(partial(Normed, weight=True)),
    "head_weights": _with(partial(HeadWeights, weight=True)),
    "mixed": _with(MixedNormed),
    "heads": _with(HeadNormed),
    "turned": _with(Turned),
    "counted_heads": _with(CountedHeads),
    "other_heads": _with(OtherHeads),
    "caught_norm": _with(CaughtNorm),
    "caught_layer": _with(CaughtLayer),
    "divided_heads": _with(DividedHeads),
    "other_ways": OtherWays,
    "fused": FusedTransformer,
    "no_rowwise": NoRowwise,
}


def _compare(name: str, layout: str, words: str = "") -> None:
    item = Item(f"split_{name}", 8, partial(_fit, name), refused={layout: words} if words else {}, relative=4e-6)
    result, why = compare_item(item, LAYOUTS[layout])
    assert result == ("refused" if words else "same"), "\n".join(why[:10])


@pytest.mark.parametrize(
    ("name", "layout", "words"),
    [
        ("split_head", "tp2", "Set vocab_head for 'head', whose output looks whole"),
        ("split_head", "tp2_pp2", "tensor['head'] is 'colwise': its features are split over the ranks"),
        ("normed", "tp2", "tensor['blocks.0.attention.query'] is 'colwise': its features are split over the ranks"),
        ("normed", "tp2_pp2", "and mean is given them before. This rank has 4 of them"),
        ("weighted", "tp2", "tensor['blocks.0.attention.query'] is 'colwise'"),
        ("head_weights", "tp2", "tensor['blocks.0.attention.query'] is 'colwise'"),
        ("counted_heads", "tp2", "Cut what 'blocks.0.attention.query' makes by the width of a head"),
        ("divided_heads", "tp2", "Cut what 'blocks.0.attention.query' makes by the width of a head"),
        ("other_heads", "tp2", "Cut what 'blocks.0.attention.query' makes by the width of a head"),
        ("other_heads", "tp2_pp2", "and view is given them before"),
        ("caught_norm", "tp2", "and layer_norm is given them before"),
        ("caught_layer", "tp2", "tensor['blocks.0.attention.norm'] is None: its input must be whole"),
        ("mixed", "tp2", "and normalize is given them before"),
        ("fused", "tp2", "Make a Linear of its own of each part that 'blocks.0.mlp.up' makes"),
        ("no_rowwise", "tp2", "Set rowwise for the layer behind it"),
    ],
)
def test_what_would_mix_split_features_is_refused(name: str, layout: str, words: str) -> None:
    _compare(name, layout, words)


@pytest.mark.parametrize("layout", ["tp2", "tp2_pp2"])
def test_what_works_within_heads_is_right(layout: str) -> None:
    _compare("heads", layout)


def test_what_turns_pairs_of_a_head_is_right() -> None:
    _compare("turned", "tp2")


@pytest.mark.parametrize("layout", ["tp2", "tp2_pp2"])
def test_errors_that_one_process_would_raise_are_left_to_the_model(layout: str) -> None:
    _compare("other_ways", layout)
