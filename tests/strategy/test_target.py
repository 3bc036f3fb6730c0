"""Which submodule is parallelised, and what its containers tell where it tells nothing itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from hybrid_strategy import ParallelPlan
from hybrid_strategy.errors import ModelError
from hybrid_strategy.strategy.target import find_plan, find_target
from tests.support.gate import gate


class Adder(pl.LightningModule):
    """A plain Sequential, and nothing said about parallelism."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self.model(batch), batch.sum(1, keepdim=True))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Parent(pl.LightningModule):
    """A module with the children it is given."""

    def __init__(self, **children: nn.Module) -> None:
        super().__init__()
        for name, child in children.items():
            setattr(self, name, child)


class Planned(nn.Linear):
    """Tells what it is told to tell."""

    plan: Any = ParallelPlan(units=("mine",))

    def parallel_plan(self) -> Any:
        return self.plan


def data() -> DataLoader[Tensor]:
    return DataLoader(torch.randn(32, 4, generator=torch.Generator().manual_seed(0)), batch_size=8)


@pytest.mark.parametrize(
    "strategy",
    [
        {"pipeline_parallel_size": 2, "num_microbatches": 4},
        {"pipeline_parallel_size": 2, "schedule": "Interleaved1F1B", "num_microbatches": 2},
        {"data_parallel_size": 2, "sharding": "zero3"},
        {"pipeline_parallel_size": 2, "activation_checkpoint": "full"},
    ],
    ids=["1F1B", "interleaved", "zero3", "recomputed"],
)
def test_a_sequential_needs_no_plan(strategy: Mapping[str, Any]) -> None:
    report = gate(Adder, data(), dict(strategy), devices=2, steps=2)
    assert report.same, str(report)


def test_target_is_model_else_the_child_with_most_parameters() -> None:
    small, large = nn.Linear(2, 2), nn.Linear(9, 9)
    assert find_target(Parent(model=small, head=large), None) == "model"
    assert find_target(Parent(body=small, head=large), None) == "head"
    assert find_target(Parent(body=small, head=large), "body") == "body"
    assert find_target(Parent(), None) == ""
    for units, target in ((("body", "head"), ""), (("layers.*",), "head")):
        flat = Parent(body=small, head=large)
        object.__setattr__(flat, "parallel_plan", lambda units=units: ParallelPlan(units=units))
        assert find_target(flat, None) == target


def test_unknown_target_is_refused_with_the_nearest() -> None:
    with pytest.raises(ModelError, match=r"module is 'boby': it must be a submodule .* Did you mean 'body'\?"):
        find_target(Parent(body=nn.Linear(2, 2)), "boby")


def test_order_in_which_a_plan_is_looked_for() -> None:
    given = ParallelPlan(units=("given",))
    assert find_plan(Parent(model=Planned(2, 2)), "model", given) is given
    assert find_plan(Parent(model=Planned(2, 2)), "model", None).units == ("mine",)
    assert find_plan(Parent(model=nn.Sequential(nn.Linear(2, 2))), "model", None).units == ("*",)
    layers = nn.ModuleDict({"few": nn.ModuleList([nn.Linear(2, 2)]), "many": nn.ModuleList([nn.Linear(9, 9)])})
    plan = find_plan(Parent(model=layers), "model", None)
    assert (plan.units, plan.shard_units, plan.checkpoint_units) == ((), ("many.*",), ("many.*",))
    assert find_plan(Parent(model=nn.Linear(2, 2)), "model", None) == ParallelPlan()


def test_a_subclass_of_sequential_may_do_something_else() -> None:
    class Residual(nn.Sequential):
        pass

    assert find_plan(Parent(model=Residual(nn.Linear(2, 2))), "model", None) == ParallelPlan()


def test_a_plan_of_another_kind_is_refused() -> None:
    model = Planned(2, 2)
    model.plan = {"units": ["*"]}
    with pytest.raises(ModelError, match=r"parallel_plan\(\) is 'dict': it must return a hybrid_strategy.ParallelPlan"):
        find_plan(Parent(model=model), "model", None)
