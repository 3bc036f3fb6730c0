"""What a model makes of an early unit's output where no mark follows: numbers of Python, errors that it catches, compiled code.

Each is right in every layout, or refused by name on every rank.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hybrid_strategy import ParallelPlan
from tests.contract import own_models
from tests.contract.items import Item, compare_item
from tests.contract.layouts import LAYOUTS
from tests.contract.model_items import _train

UNITS = own_models.Transformer.plan.units


class Early(own_models.Transformer):
    """Makes a factor of what an early layer returns."""

    def forward(self, ids: Tensor) -> Tensor:
        x, seen = self.tokens(ids), []
        for block in self.blocks:
            x = block(x + self.places)
            seen.append(x)
        return self.head(self.norm(x) * self.factor(seen[0]))

    def factor(self, early: Tensor) -> Any:
        return 2.0 if early.abs().max() > 0.5 else 1.0


class CarriedEarly(Early):
    plan = ParallelPlan(units=UNITS, carried=("blocks.0",))


class ItemOf(Early):
    def factor(self, early: Tensor) -> Any:
        return max(early.std().item(), 2.0)


class Compared(Early):
    def factor(self, early: Tensor) -> Any:
        return 2.0 if torch.allclose(early, early * 1.001, rtol=0.1) else 1.0


class Caught(Early):
    """Catches an error that only missing values lead to."""

    def factor(self, early: Tensor) -> Any:
        try:
            gram = early.transpose(1, 2) @ early + torch.eye(own_models.WIDTH)
            return torch.linalg.cholesky(gram).diagonal(dim1=1, dim2=2)[:, None]
        except Exception:
            return 1.0


class CaughtShape(Early):
    """Catches an error that is one of shapes, in one process as well."""

    def factor(self, early: Tensor) -> Any:
        try:
            return early.view(-1, own_models.WIDTH + 1)
        except RuntimeError:
            return 3.0


class Bounded(own_models.Transformer):
    """Looks for overflows after every layer."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x + self.places)
            if torch.isinf(x).any():
                x = x.clamp(-1e4, 1e4)
        return self.head(self.norm(x))


class Checked(own_models.Transformer):
    """Stops at what is not finite."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x + self.places)
            assert torch.isfinite(x).all()
        return self.head(self.norm(x))


class KeepsMean(own_models.Transformer):
    """Keeps a moving mean of an early layer's output between its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(own_models.WIDTH))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for index, block in enumerate(self.blocks):
            x = block(x + self.places)
            if index == 0:
                self.keep(x.detach().mean((0, 1)))
        return self.head(self.norm(x))

    def keep(self, mean: Tensor) -> None:
        self.mean.mul_(0.9).add_(mean, alpha=0.1)


class Unset(own_models.Transformer):
    """Has a buffer that is not set yet."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("best", torch.tensor(float("nan")))


class AssignsMean(KeepsMean):
    def keep(self, mean: Tensor) -> None:
        self.mean = self.mean * 0.9 + mean * 0.1


class ScaledLayer(own_models.EncoderLayer):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor(3.0))


class AsksForBuffers(own_models.Transformer):
    """Asks a layer for what it may have, and has."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ScaledLayer() for _ in range(4))

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * getattr(self.blocks[0], "scale", 1.0) * getattr(self.blocks[0], "none_such", 2.0)


@torch.compile(backend="eager")
def _gated(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


class AsksForLooks(own_models.Transformer):
    """Takes type, device and shape of what its layers return for tensors of its own."""

    def forward(self, ids: Tensor) -> Tensor:
        x, ones = self.tokens(ids), torch.ones(1, dtype=torch.float64)
        for block in self.blocks:
            x = block(x + self.places)
            x = x * ones.to(x) * ones.type_as(x) * ones.to(x.dtype).expand_as(x)
        return self.head(self.norm(x))


@torch.compile(backend="eager", fullgraph=True)
def _shifted(x: Tensor) -> Tensor:
    return x + x.mean(-1, keepdim=True)


class CompiledBetween(own_models.Transformer):
    """Calls compiled functions between its layers."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = _shifted(_gated(block(x + self.places)))
        return self.head(self.norm(x))


class CompiledWithin(own_models.Attention):
    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        return super().forward(_shifted(x), memory) + self.out(_gated(self.query(x)))


class CompiledInLayers(own_models.Transformer):
    """Calls a compiled function on features that are split."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.attention = CompiledWithin()


def _compare(kind: type[nn.Module], layout: str, words: str = "") -> None:
    run = partial(_train, kind, False, False, True)
    item = Item(f"lost_{kind.__name__}", 8, run, refused={layout: words} if words else {}, relative=4e-6)
    result, why = compare_item(item, LAYOUTS[layout])
    assert result == ("refused" if words else "same"), "\n".join(why[:10])


@pytest.mark.parametrize(
    ("kind", "layout", "words"),
    [
        (Early, "pp2_1f1b", "its forward reads (bool) a value that an earlier unit has made"),
        (Early, "pp2_zbv", "blocks.0 made it, on another stage. Set carried=('blocks.0',)"),
        (ItemOf, "tp2_pp2", "its forward reads (item)"),
        (Compared, "pp2_interleaved", "its forward reads (allclose)"),
        (Caught, "pp2_1f1b", "its forward fails (_LinAlgError"),
        (Checked, "pp2_1f1b", "its forward reads (bool)"),
        (
            KeepsMean,
            "pp2_1f1b",
            "buffer is 'model.mean': its forward writes to it what a unit of another pipeline stage has made",
        ),
        (KeepsMean, "pp2_interleaved", "Write to a buffer of the unit itself"),
        (AssignsMean, "pp2_1f1b", "buffer is 'model.mean'"),
        (AsksForBuffers, "pp2_1f1b", "was asked for its layers or weights. 'scale' of unit 1"),
    ],
)
def test_what_nobody_can_follow_is_refused(kind: type[nn.Module], layout: str, words: str) -> None:
    _compare(kind, layout, words)


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        (CarriedEarly, "pp2_1f1b"),
        (CaughtShape, "pp2_1f1b"),
        (Unset, "pp2_1f1b"),
        (Bounded, "pp2_interleaved"),
        (AsksForLooks, "pp2_1f1b"),
        (CompiledBetween, "pp2_1f1b"),
        (CompiledBetween, "pp2_interleaved"),
        (CompiledInLayers, "tp2"),
    ],
)
def test_what_comes_to_nothing_is_right(kind: type[nn.Module], layout: str) -> None:
    _compare(kind, layout)
