"""B13, kind of fault: what does not divide evenly is dropped.

Every layer lies on exactly one stage, in order, in whatever number, under every schedule's way of placing stages; the parameters
of all ranks together are those of the whole model; more stages than layers are refused.
"""

from __future__ import annotations

from functools import partial
from itertools import chain
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader

from hybrid_strategy import ParallelPlan
from hybrid_strategy.errors import LayoutError
from hybrid_strategy.planning.balance import cut_units
from hybrid_strategy.planning.build_plan import build_plan
from hybrid_strategy.planning.layouts import check_layout
from hybrid_strategy.registry import parts
from hybrid_strategy.spec.batch import BatchSpec
from hybrid_strategy.spec.layout import Layout
from hybrid_strategy.spec.model_shape import ModelShape
from tests.support.gate import gate
from tests.support.ranks import RankFailedError
from tests.support.stacks import WIDTH, Blocks, Rows

TWO_STAGES_A_RANK = [name for name, part in parts("schedules").items() if part.default_stages_per_rank == 2]


def _data() -> DataLoader[Any]:
    return DataLoader(Rows([3] * 16), batch_size=8)


@given(st.integers(1, 40), st.integers(1, 12), st.data())
def test_every_layer_is_on_one_stage_in_order(num_layers: int, num_stages: int, data: st.DataObject) -> None:
    units = ("embed", *(f"layers.{index}" for index in range(num_layers)), "norm", "head")
    costs = data.draw(st.lists(st.floats(0, 100), min_size=len(units), max_size=len(units)))
    if num_stages > num_layers:
        with pytest.raises(LayoutError, match="every stage needs a layer"):
            cut_units(units, num_stages, costs)
        return
    stages = cut_units(units, num_stages, costs)
    assert tuple(chain(*stages)) == units
    assert len(stages) == num_stages
    assert all(any(name.startswith("layers.") for name in stage) for stage in stages)


@pytest.mark.parametrize("num_layers", [3, 5, 7, 10])
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_the_plan_counts_all_parameters(num_layers: int, stages: int) -> None:
    shape = ModelShape(32, num_layers, 4, 64, 101, 16, num_key_value_heads=2)
    layout = Layout(pipeline_parallel_size=stages)
    if stages > num_layers:
        with pytest.raises(LayoutError, match=rf"{stages} stages for {num_layers} layers"):
            check_layout(layout, shape=shape)
        return
    plan = build_plan(layout, BatchSpec(8, 4), shape)
    assert sum(plan.rank_parameters) == plan.num_parameters == shape.num_parameters
    assert sum(name.startswith("layers.") for stage in plan.stage_units for name in stage) == num_layers


@pytest.mark.parametrize(
    ("num_layers", "stages"), [(3, 2), (5, 2), (7, 2), (3, 3), (5, 3), (7, 3), (10, 3), (5, 4), (7, 4), (10, 4)]
)
def test_every_layer_computes_and_learns(num_layers: int, stages: int) -> None:
    report = gate(partial(Blocks, num_layers), _data(), {"pipeline_parallel_size": stages, "num_microbatches": 4}, devices=stages)
    assert report.same, str(report)
    assert report.num_tensors == 2 * (num_layers + 1)


@pytest.mark.parametrize("schedule", TWO_STAGES_A_RANK)
@pytest.mark.parametrize("num_layers", [5, 7])
def test_two_stages_a_rank(schedule: str, num_layers: int) -> None:
    strategy = {"pipeline_parallel_size": 2, "num_microbatches": 4, "schedule": schedule}
    report = gate(partial(Blocks, num_layers), _data(), strategy)
    assert report.same, str(report)


@pytest.mark.parametrize("cuts", [[1], [3], [4]])
def test_cuts_that_the_user_chooses(cuts: list[int]) -> None:
    strategy = {"pipeline_parallel_size": 2, "num_microbatches": 4, "stage_cuts": cuts}
    report = gate(partial(Blocks, 5), _data(), strategy)
    assert report.same, str(report)


@pytest.mark.parametrize("cuts", [[0], [6], [2, 4], []])
def test_cuts_that_lose_something_are_refused(cuts: list[int]) -> None:
    with pytest.raises(RankFailedError, match="stage_cuts is "):
        gate(partial(Blocks, 5), _data(), {"pipeline_parallel_size": 2, "stage_cuts": cuts})


def test_more_stages_than_layers_are_refused_on_every_rank() -> None:
    with pytest.raises(RankFailedError, match="every stage needs a layer of its own") as caught:
        gate(partial(Blocks, 2), _data(), {"pipeline_parallel_size": 3}, devices=3)
    assert "rank 0" in str(caught.value)


class Residual(nn.Linear):
    """A layer with its residual inside, so that its output is all that goes on."""

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + super().forward(inputs).relu()


class TwoTowers(nn.Module):
    """Two lists of layers of different width, with a bridge between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.ModuleList(Residual(WIDTH, WIDTH) for _ in range(3))
        self.bridge = nn.Linear(WIDTH, 2 * WIDTH)
        self.second = nn.ModuleList(Residual(2 * WIDTH, 2 * WIDTH) for _ in range(2))
        self.head = nn.Linear(2 * WIDTH, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        for layer in self.first:
            inputs = layer(inputs)
        inputs = self.bridge(inputs)
        for layer in self.second:
            inputs = layer(inputs)
        return self.head(inputs)

    def parallel_plan(self) -> ParallelPlan:
        return ParallelPlan(units=("first.*", "bridge", "second.*", "head"))


class Towers(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.towers = TwoTowers()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.mse_loss(self.towers(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_layers_of_two_lists(stages: int) -> None:
    report = gate(Towers, _data(), {"pipeline_parallel_size": stages, "num_microbatches": 2}, devices=stages)
    assert report.same, str(report)
    assert report.num_tensors == 14
