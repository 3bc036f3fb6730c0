"""Faults to plant into a layout's ranks: each makes a context in which one thing is wrong, as it was in somebody's engine."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch

from hybrid_strategy import parallelize
from hybrid_strategy.models.llama import DecoderLayer
from hybrid_strategy.parallel.sharding import _early, ddp
from hybrid_strategy.parallel.stage_now import StageNow
from hybrid_strategy.strategy import precision
from hybrid_strategy.strategy.hybrid import HybridParallelStrategy
from hybrid_strategy.strategy.peers import Peers
from hybrid_strategy.strategy.step import StepEngine

Context = contextlib.AbstractContextManager[Any]


def _around(owner: Any, name: str, make: Callable[[Any], Any]) -> Context:
    """`owner.name` replaced by `make(what it was)`."""
    return patch.object(owner, name, make(getattr(owner, name)))


class Scaled:
    """All gradients times `factor`: a mean that is forgotten, or taken twice."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self) -> Context:
        return _around(StepEngine, "hand_over", lambda real: lambda engine, scale: real(engine, scale * self.factor))


class ScaledLoss:
    """The reported loss times `factor`, gradients right."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self) -> Context:
        def make(real: Any) -> Any:
            def train(engine: Any, call: Any, scale: float) -> Any:
                loss, output = real(engine, call, scale)
                return loss * self.factor, output

            return train

        return _around(StepEngine, "train", make)


def no_sum_over_tensor_ranks() -> Context:
    """Norms under sequence parallelism keep their partial sums."""
    return patch.object(ddp, "sum_partial", lambda slots, gradients, groups: gradients)


@contextlib.contextmanager
def _reduced_late(make: Callable[[Any], Any]) -> Iterator[None]:
    """All gradients are reduced when the backward pass is over, by `make(the real sum_over)`."""
    with patch.object(_early.EarlyReduction, "want", lambda early, slots: None), _around(ddp, "sum_over", make):
        yield


def no_sum_over_data_ranks() -> Context:
    """Every data-parallel rank keeps its own gradients."""
    return _reduced_late(lambda real: lambda slots, gradients, *where: gradients)


def no_sum_of_one_tensor() -> Context:
    """One tensor is left out of the reduction."""

    def make(real: Any) -> Any:
        def sum_over(slots: Any, gradients: Any, *where: Any) -> Any:
            kept = None if gradients[5] is None else gradients[5].clone()
            summed = real(slots, gradients, *where)
            return [kept if index == 5 else each for index, each in enumerate(summed)]

        return sum_over

    return _reduced_late(make)


def local_norm() -> Context:
    """Each rank clips by the norm of what it holds itself."""

    def total_norm(gradients: Any, norm_type: float, device: torch.device) -> torch.Tensor:
        return torch.linalg.vector_norm(torch.stack([each.norm() for each in gradients])).double()

    return patch.object(precision, "total_norm", total_norm)


@contextlib.contextmanager
def dropped_layer() -> Iterator[None]:
    """The cut loses the last layer of the model, and nobody looks at what came over it."""

    def make(real: Any) -> Any:
        def cut_model(root: Any, units: Any, kept: Any, context: Any) -> Any:
            return real(root, units, kept - {units.index("layers.3")}, context)

        return cut_model

    nobody_looks = {"skipped": lambda now, *_: now.received, "waits": False}
    with _around(parallelize, "cut_model", make), patch.multiple(StageNow, **nobody_looks):
        yield


@contextlib.contextmanager
def idle_layer() -> Iterator[None]:
    """A layer is there and is never computed with."""
    seen: list[Any] = []

    def make(real: Any) -> Any:
        def forward(layer: Any, hidden: Any, *arguments: Any) -> Any:
            if layer not in seen:
                seen.append(layer)
            return hidden if len(seen) > 1 and layer is seen[1] else real(layer, hidden, *arguments)

        return forward

    with _around(DecoderLayer, "forward", make):
        yield


def perturbed() -> Context:
    """Rank 1's weights are moved after every step, its own rows under a sharding."""

    def make(real: Any) -> Any:
        def optimizer_step(strategy: HybridParallelStrategy, *arguments: Any, **more: Any) -> Any:
            result = real(strategy, *arguments, **more)
            if strategy.global_rank == 1:
                sharding = strategy.made.sharding
                with torch.no_grad():
                    sharding.optimizer_parameter(sharding.slots[3]).add_(1e-3)
            return result

        return optimizer_step

    return _around(HybridParallelStrategy, "optimizer_step", make)


def perturbed_at_the_start() -> Context:
    """Rank 1 starts from a weight of its own."""

    def make(real: Any) -> Any:
        def attach(sharding: Any) -> None:
            real(sharding)
            if os.environ["RANK"] == "1":
                with torch.no_grad():
                    sharding.slots[0].parameter[0, 0] += 2**-20

        return attach

    return _around(ddp.ReplicatedSharding, "attach", make)


def two_owners() -> Context:
    """Every data-parallel rank counts everything in the norm."""
    return _around(ddp, "owned_once", lambda real: lambda slot, mine: real(slot, True))


def samples_by_world_size() -> Context:
    """Data is divided by the number of processes, tensor and pipeline peers included."""

    def kwargs(strategy: HybridParallelStrategy) -> dict[str, int]:
        return {"num_replicas": strategy.world_size, "rank": strategy.global_rank}

    unnoticed = patch.object(Peers, "_apart", lambda *_: None)  # which looks at some batches only
    return _both(unnoticed, patch.object(HybridParallelStrategy, "distributed_sampler_kwargs", property(kwargs)))


@contextlib.contextmanager
def _both(first: Context, second: Context) -> Iterator[None]:
    with first, second:
        yield


def every_rank_reads_the_same() -> Context:
    """Data is not divided at all."""
    return patch.object(HybridParallelStrategy, "distributed_sampler_kwargs", {"num_replicas": 1, "rank": 0})


def faster_optimizer() -> Context:
    """The learning rate is scaled by the number of processes behind the user's back."""

    def make(real: Any) -> Any:
        def optimizer_step(strategy: Any, optimizer: Any, *arguments: Any, **named: Any) -> Any:
            for group in optimizer.param_groups:
                group["lr"] = 0.5 * strategy.world_size
            return real(strategy, optimizer, *arguments, **named)

        return optimizer_step

    return _around(HybridParallelStrategy, "optimizer_step", make)
