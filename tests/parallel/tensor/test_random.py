"""Dropout: one mask for replicas, other masks for slices, the same masks again when a block is recomputed."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hybrid_strategy.parallel.tensor.apply import apply_tensor_parallel
from hybrid_strategy.parallel.tensor.random import RegionRandom, draws_random_numbers
from hybrid_strategy.spec.parallel_plan import ParallelPlan
from tests.support.ranks import run_ranks

WIDTH = 64


class Masks(nn.Dropout):
    """Remembers what it let through."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.seen = [*getattr(self, "seen", []), (y != 0).detach()]
        return y


class MLP(nn.Module):
    """Dropout inside the region, and behind it in the same sub-block."""

    def __init__(self) -> None:
        super().__init__()
        up, down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleDict({"up": up, "inner": Masks(0.5), "down": down, "outer": Masks(0.5)})

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers.values():
            x = layer(x)
        return x


class Block(nn.Module):
    """Dropout behind the sub-block too."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp, self.residual = MLP(), Masks(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.residual(self.mlp(x))


def blocks() -> nn.ModuleList:
    torch.manual_seed(3)
    model = nn.ModuleList(Block() for _ in range(2))
    rules = {"*.mlp": "replicate_input", "*.mlp.layers.up": "colwise", "*.mlp.layers.down": "rowwise"}
    apply_tensor_parallel(
        model, ParallelPlan(tensor=rules), group=dist.group.WORLD, rank=dist.get_rank(), size=dist.get_world_size()
    )
    return model


def run(model: nn.ModuleList, recompute: bool) -> tuple[Tensor, list[Tensor]]:
    torch.manual_seed(11)
    x = torch.ones(2, 3, WIDTH, requires_grad=True)
    y = x
    for block in model:
        y = checkpoint(block, y, use_reentrant=False) if recompute else block(y)
    y.square().sum().backward()
    return torch.rand(1), [x.grad, *(each.grad for each in model.parameters())]


def masks() -> dict[str, list[Tensor]]:
    model = blocks()
    after, _ = run(model, recompute=False)
    found = {name: each.seen for name, each in model.named_modules() if isinstance(each, Masks)}
    return {**found, "after": [after]}


@pytest.mark.parametrize("size", [2, 4])
def test_replicas_share_masks_and_slices_do_not(size: int) -> None:
    first, *others = run_ranks(masks, size)
    for other in others:
        for name, seen in first.items():
            alike = all(torch.equal(a, b) for a, b in zip(seen, other[name], strict=True))
            assert alike == ("inner" not in name), name
    for kind in ("inner", "outer"):
        assert not torch.equal(first[f"0.mlp.layers.{kind}"][0], first[f"1.mlp.layers.{kind}"][0])


def check_recomputation() -> None:
    model = blocks()
    after, expected = run(model, recompute=False)
    for parameter in model.parameters():
        parameter.grad = None
    again, got = run(model, recompute=True)
    assert torch.equal(after, again)
    for one, other in zip(expected, got, strict=True):
        assert torch.equal(one, other)
    for each in model.modules():
        if isinstance(each, Masks):
            assert all(torch.equal(each.seen[0], mask) for mask in each.seen)
    assert len(model[0].mlp.layers["inner"].seen) == 3


def test_recomputation_repeats_the_masks() -> None:
    run_ranks(check_recomputation, 2)


class Failing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise KeyError("on purpose")


def check_failure() -> None:
    model = blocks()
    model[0].mlp.layers["down"] = Failing()
    torch.manual_seed(5)
    torch.randint(2**62, ())
    expected = torch.rand(1)
    torch.manual_seed(5)
    with pytest.raises(KeyError):
        model[0](torch.ones(1, 1, WIDTH))
    assert torch.equal(torch.rand(1), expected)
    model.eval()
    before = torch.get_rng_state()
    model[1](torch.ones(1, 1, WIDTH))
    assert torch.equal(before, torch.get_rng_state())


def test_a_failure_gives_the_common_state_back_and_evaluation_draws_nothing() -> None:
    run_ranks(check_failure, 2)


def test_leaving_twice_is_leaving_once() -> None:
    state = RegionRandom(1)
    torch.manual_seed(1)
    state.enter(torch.device("cpu"))
    state.leave()
    expected = torch.get_rng_state()
    torch.rand(1)
    state.leave()
    assert not torch.equal(torch.get_rng_state(), expected)


def test_what_draws() -> None:
    functional = nn.Identity()
    functional.attention_dropout = 0.1
    silent = nn.Identity()
    silent.dropout = 0.0
    for module, expected in ((nn.Dropout(0.1), True), (nn.Dropout(0.0), False), (functional, True), (silent, False)):
        assert draws_random_numbers(nn.Sequential(module, nn.Linear(1, 1))) == expected
