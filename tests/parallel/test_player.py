"""The player against one process: any verified table gives the gradients of the whole model, whatever passes between stages."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from hybrid_strategy import registry
from hybrid_strategy.distributed.groups import build_groups
from hybrid_strategy.parallel.player import Player
from hybrid_strategy.parallel.transport import Transport
from hybrid_strategy.spec.layout import Layout
from tests.support.ranks import run_ranks

WIDTH, ROWS = 6, 5


class Chain:
    """A chain of linear stages; stage `s` hands on a dict with a used tensor, an ignored one and an integer."""

    def __init__(self, num_stages: int, stages: tuple[int, ...], frozen: tuple[int, ...], twice: bool) -> None:
        torch.manual_seed(0)
        layers = [nn.Linear(WIDTH, WIDTH).double() for _ in range(num_stages)]
        for stage in frozen:
            layers[stage].requires_grad_(False)
        self.layers = {stage: layers[stage] for stage in stages}
        self.num_stages, self.twice = num_stages, twice
        self.batches = [torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(j)).double() for j in range(16)]
        self.losses: list[float] = []

    def run(self, stage: int, x: torch.Tensor) -> torch.Tensor:
        out = torch.tanh(self.layers[stage](x))
        return torch.tanh(self.layers[stage](out)) if self.twice else out

    def forward(self, stage: int, micro_batch: int, received: Any) -> Any:
        x = self.batches[micro_batch] if received is None else received["x"]
        out = self.run(stage, x)
        if stage == self.num_stages - 1:
            loss = out.square().mean()
            self.losses.append(loss.item())
            return loss
        return {"x": out, "ignored": out * 2, "number": torch.tensor([stage])}

    def first_half(self) -> AbstractContextManager[None]:
        return nullcontext()

    def before_weight(self, weight: nn.Parameter) -> None:
        pass

    def before_backward(self, stage: int, micro_batch: int) -> None:
        pass

    def after_backward(self, stage: int, micro_batch: int) -> None:
        pass

    def gradients(self) -> dict[str, torch.Tensor | None]:
        return {f"{stage}.{n}": p.grad for stage, layer in self.layers.items() for n, p in layer.named_parameters()}


def play_here(schedule: str, size: int, microbatches: int, frozen: tuple[int, ...], twice: bool) -> dict[str, Any]:
    part = registry.find("schedules", schedule, "schedule")
    per_rank = part.default_stages_per_rank
    layout = Layout(pipeline_parallel_size=size, schedule=part.name, stages_per_rank=per_rank)
    groups = build_groups(layout, torch.device("cpu"))
    rank = groups.coordinate.pipeline_parallel
    table = part.build(size, per_rank, microbatches)
    chain = Chain(table.num_stages, table.stages_of(rank), frozen, twice)
    player = Player(rank, Transport(groups, torch.device("cpu")))
    for _ in range(2):  # the second time all shapes are known and receives are posted ahead
        for layer in chain.layers.values():
            layer.zero_grad()
        player.play(table, chain, ["same"] * microbatches)
    return {"gradients": chain.gradients(), "in_flight": player.peak_in_flight}


def whole(num_stages: int, microbatches: int, frozen: tuple[int, ...], twice: bool) -> dict[str, torch.Tensor | None]:
    chain = Chain(num_stages, tuple(range(num_stages)), frozen, twice)
    for j in range(microbatches):
        x = chain.batches[j]
        for stage in range(num_stages):
            x = chain.run(stage, x)
        loss = x.square().mean()
        if loss.requires_grad:
            loss.backward()
    return chain.gradients()


SCHEDULES = list(registry.parts("schedules"))


@pytest.mark.parametrize("twice", [False, True], ids=["once", "layer_used_twice"])
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_gives_the_whole_models_gradients(schedule: str, size: int, twice: bool) -> None:
    part = registry.find("schedules", schedule, "schedule")
    for microbatches in (1, 2, 5):
        ranks = run_ranks(play_here, size, schedule, size, microbatches, (), twice)
        check(ranks, whole(size * part.default_stages_per_rank, microbatches, (), twice))
        for rank, result in enumerate(ranks):
            assert result["in_flight"] <= part.max_in_flight(rank, size, part.default_stages_per_rank, microbatches)


@pytest.mark.parametrize("frozen", [(0,), (1,), (0, 1)], ids=str)
@pytest.mark.parametrize("schedule", ["1F1B", "InterleavedZeroBubble"])
def test_frozen_stages_get_no_gradient_and_stop_nothing(schedule: str, frozen: tuple[int, ...]) -> None:
    part = registry.find("schedules", schedule, "schedule")
    num_stages = 2 * part.default_stages_per_rank
    ranks = run_ranks(play_here, 2, schedule, 2, 3, frozen, False, timeout=30)
    check(ranks, whole(num_stages, 3, frozen, False))


def check(ranks: list[dict[str, Any]], expected: dict[str, torch.Tensor | None]) -> None:
    found = {name: value for result in ranks for name, value in result["gradients"].items()}
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if value is None:
            assert found[name] is None, name
        else:
            torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-12)
