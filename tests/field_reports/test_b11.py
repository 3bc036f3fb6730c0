"""B11, kind of fault: random numbers that depend on the layout where they must not, or do not where they must.

First values are the same in every layout. Masks: one for all tensor ranks where the activation is whole, others where it is
split, other ones for every data-parallel replica and every layer; recomputation draws the same again.
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from hybrid_strategy.spec.parallel_plan import ParallelPlan
from tests.support.gate import gate
from tests.support.ranks import run_ranks
from tests.support.training import Case, Tokens, train_here

WIDTH = 16


class Watched(nn.Dropout):
    """Keeps the masks of its training passes."""

    def __init__(self) -> None:
        super().__init__(0.5)
        self.masks: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        mask = super().forward(torch.ones_like(x))
        if self.training:
            self.masks.append(mask.detach() != 0)
        return x * mask


class Mlp(nn.Module):
    """Dropout on what is split."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.inner, self.down = nn.Linear(WIDTH, 32), Watched(), nn.Linear(32, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.inner(torch.tanh(self.up(x))))


class Layer(nn.Module):
    """Dropout on what is whole, outside of the sub-block."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp, self.outer = Mlp(), Watched()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(self.mlp(x))


class Model(nn.Module):
    """Four of them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.head = nn.Linear(WIDTH, 64)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

    def parallel_plan(self) -> ParallelPlan:
        tensor = {"layers.*.mlp": "replicate_input", "layers.*.mlp.up": "colwise", "layers.*.mlp.down": "rowwise"}
        return ParallelPlan(units=("embedding", "layers.*", "head"), tensor=tensor)


class Dropped(pl.LightningModule):
    """Trains it."""

    def __init__(self, shape: Any = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = Model()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = nn.functional.cross_entropy(self.model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        pass

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _run(strategy: dict[str, Any]) -> tuple[dict[str, list[Tensor]], list[float], dict[str, Any]]:
    kept: dict[str, list[Tensor]] = {}

    class Keep(pl.Callback):
        def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
            for name, each in module.named_modules():
                if isinstance(each, Watched) and each.masks:
                    kept[name] = each.masks

    record = train_here(Case(strategy=strategy, trainer={"callbacks": [Keep()]}, module=Dropped, batch_size=4, steps=2))
    losses = [step["loss"] for step in record["steps"]]
    return kept, losses, record["initial"]


def _run_all(*strategies: dict[str, Any]) -> list[Any]:
    return [_run(each) for each in strategies]


def _same(left: list[Tensor], right: list[Tensor]) -> bool:
    return len(left) == len(right) and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def test_masks_of_data_parallel_replicas_and_of_layers_differ() -> None:
    first, second = (each[0][0] for each in run_ranks(_run_all, 2, {}, process_group=False))
    assert len(first) == 8
    assert not any(_same(first[name], second[name]) for name in first)
    outer = [masks[0] for name, masks in first.items() if name.endswith("outer")]
    assert not any(torch.equal(a, b) for index, a in enumerate(outer) for b in outer[:index])
    assert not any(torch.equal(masks[0], masks[1]) for masks in first.values()), "a step's mask is a new one"


def test_masks_of_tensor_ranks_are_one_where_the_activation_is_whole() -> None:
    first, second = (each[0][0] for each in run_ranks(_run_all, 2, {"tensor_parallel_size": 2}, process_group=False))
    for name in first:
        assert _same(first[name], second[name]) == name.endswith("outer"), name


def test_masks_of_stages_differ() -> None:
    strategy = {"pipeline_parallel_size": 2, "num_microbatches": 2}
    first, second = (each[0][0] for each in run_ranks(_run_all, 2, strategy, process_group=False))
    assert first.keys().isdisjoint(second.keys())
    masks = [each[0] for held in (first, second) for name, each in held.items() if name.endswith("outer")]
    assert not any(torch.equal(a, b) for index, a in enumerate(masks) for b in masks[:index])


@pytest.mark.parametrize("strategy", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2, "num_microbatches": 2}])
def test_recomputation_draws_the_same_masks(strategy: dict[str, Any]) -> None:
    both = run_ranks(_run_all, 2, strategy, {**strategy, "activation_checkpoint": "full"}, process_group=False)
    for plain, recomputed in both:
        assert plain[1] == pytest.approx(recomputed[1], rel=1e-6), "two steps' losses: the second depends on all gradients"


@pytest.mark.parametrize("size", [2, 4])
def test_first_values_do_not_depend_on_the_layout(size: int) -> None:
    class_free = {"tensor_parallel_size": size}
    data = DataLoader(Tokens(16), batch_size=4)
    report = gate(Dropless, data, class_free, devices=size, steps=1)
    assert report.same, str(report)
    assert any(row.quantity == "initial weights" for row in report.rows)


class Dropless(Dropped):
    """Without dropout: masks of split activations are other ones than one process draws."""

    def __init__(self) -> None:
        super().__init__()
        for each in self.modules():
            if isinstance(each, Watched):
                each.p = 0.0
