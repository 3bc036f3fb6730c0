"""What every family must keep, run over the registry: a new file in `models/` is tested the moment it exists."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from hybrid_strategy.parallel.materialise import Initialiser
from hybrid_strategy.parallel.tensor.apply import apply_tensor_parallel
from hybrid_strategy.registry import find, parts
from hybrid_strategy.spec.parallel_plan import matches
from tests.support.ranks import run_ranks

FAMILIES = sorted(parts("models"))


def build(family: str, **change: Any) -> nn.Module:
    part = find("models", family, "family")
    model: nn.Module = part.build(replace(part.tiny, **change)).double()
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.data.normal_(0.0, 0.3, generator=generator)
    return model


def batch(model: nn.Module) -> tuple[Tensor, Tensor]:
    shape = model.shape
    ids, labels = torch.randint(0, shape.vocab_size, (2, 2, shape.sequence_length), generator=torch.Generator().manual_seed(2))
    return ids, labels


def units(model: nn.Module) -> list[str]:
    names = [name for name, _ in model.named_modules()]
    return [name for pattern in model.parallel_plan().units for name in names if name and matches(pattern, name)]


@pytest.mark.parametrize("family", FAMILIES)
def test_shape_and_names(family: str) -> None:
    part = find("models", family, "family")
    assert part.name == part.tiny.family == family
    with torch.device("meta"):
        model = part.build(part.tiny)
    assert all(each.is_meta for each in model.parameters())
    assert not list(model.buffers()), "nothing says what a buffer on the meta device holds"
    assert sum(each.numel() for each in model.parameters()) == part.tiny.num_parameters
    assert [each for each in parts("models").values() if each.matches(model)] == [part]


@pytest.mark.parametrize("family", FAMILIES)
def test_plan_covers_the_model(family: str) -> None:
    model = build(family)
    plan, names = model.parallel_plan(), [name for name, _ in model.named_modules()]
    for pattern in (*plan.units, *plan.tensor, *plan.checkpoint_units, *plan.shard_units):
        assert any(matches(pattern, name) for name in names), pattern
    held = {f"{unit}.{key}" for unit in units(model) for key, _ in model.get_submodule(unit).named_parameters()}
    assert held == {name for name, _ in model.named_parameters()}
    assert set(plan.heads.values()) == {model.shape.num_attention_heads, model.shape.kv_heads}


class Recorded(nn.Module):
    """Stands where a unit stood, has nothing of it, and returns a fixed hidden state."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.hidden


@pytest.mark.parametrize("family", FAMILIES)
def test_forward_calls_the_units_in_order_and_needs_nothing_else_of_them(family: str) -> None:
    model = build(family)
    ids, _ = batch(model)
    order: list[tuple[str, Tensor]] = []
    outputs: dict[str, Tensor] = {}

    def record(unit: str, args: tuple[Tensor, ...], output: Tensor) -> None:
        order.append((unit, args[0]))
        outputs[unit] = output

    for unit in units(model):
        model.get_submodule(unit).register_forward_hook(lambda _, args, output, unit=unit: record(unit, args, output))
    logits = model(ids)
    assert [unit for unit, _ in order] == units(model)
    assert order[0][1] is ids
    for (_, given), (before, _) in zip(order[1:], order, strict=False):
        assert given is outputs[before]
    for cut in range(1, len(order)):
        stage = build(family)
        for unit in units(model)[:cut]:
            parent, _, child = unit.rpartition(".")
            stage.get_submodule(parent)._modules[child] = Recorded(outputs[units(model)[cut - 1]])
        assert torch.equal(stage(ids), logits)


@pytest.mark.parametrize("family", FAMILIES)
def test_first_values(family: str) -> None:
    model = build(family).float()
    first, again, other = (Initialiser(model, seed) for seed in (1, 1, 2))
    for name, parameter in model.named_parameters():
        values = first.whole(name)
        assert values.shape == parameter.shape
        assert values.isfinite().all()
        assert torch.equal(values, again.whole(name))
        assert parameter.dim() == 1 or not torch.equal(values, other.whole(name))


def check_split(family: str, sequence_parallel: bool, tied: bool) -> None:
    whole, model = build(family, tied_embeddings=tied), build(family, tied_embeddings=tied)
    group, rank, size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    plan = model.parallel_plan()
    shards = apply_tensor_parallel(model, plan, group=group, rank=rank, size=size, sequence_parallel=sequence_parallel)
    ids, labels = batch(whole)
    losses = [F.cross_entropy(each(ids).flatten(0, 1), labels.flatten()) for each in (whole, model)]
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-12, atol=1e-12)
    for loss in losses:
        loss.backward()
    for name, parameter in model.named_parameters():
        if shards[name].partial_gradient:
            dist.all_reduce(parameter.grad)
        expected = shards[name].of(whole.get_parameter(name).grad)
        assert torch.allclose(parameter.grad, expected, rtol=1e-12, atol=1e-12), name


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_split_over_two_ranks(family: str, sequence_parallel: bool, tied: bool) -> None:
    run_ranks(check_split, 2, family, sequence_parallel, tied)
