"""B04, kind of fault: a number of the whole model is taken from the part that a rank holds.

The norm that clips is that of all stages, shards and layers together: tied weights once, slices once, replicas once, frozen
weights not at all.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cache, partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from hybrid_strategy import HybridParallelStrategy
from hybrid_strategy.distributed.gradient_norm import total_norm
from tests.support.gate import gate
from tests.support.ranks import run_ranks
from tests.support.training import SHAPE, TinyLM, Tokens

PIPELINE = {"pipeline_parallel_size": 2, "num_microbatches": 4}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "pp2": (2, PIPELINE),
    "pp2_zero_bubble": (2, {**PIPELINE, "schedule": "ZBVZeroBubble"}),
    "tp2_sequence": (2, {"tensor_parallel_size": 2, "sequence_parallel": True}),
    "tp2_pp2": (4, {**PIPELINE, "tensor_parallel_size": 2}),
    "dp2_pp2_zero1": (4, {**PIPELINE, "sharding": "zero1"}),
    "dp2_pp2_zero3": (4, {**PIPELINE, "sharding": "zero3"}),
}


class Tied(TinyLM):
    """Its embedding is its head."""

    def __init__(self) -> None:
        from dataclasses import replace

        super().__init__(replace(SHAPE, tied_embeddings=True), "sgd")


class Frozen(TinyLM):
    """Its first layers and its head do not train, and have no gradient to count."""

    def configure_model(self) -> None:
        super().configure_model()
        assert self.model is not None
        for name in ("embed_tokens", "layers.0", "lm_head"):
            self.model.get_submodule(name).requires_grad_(False)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([each for each in self.parameters() if each.requires_grad], lr=0.5)


class ClipsItself(TinyLM):
    """Overrides Lightning's hook and calls what Lightning offers there."""

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.02, gradient_clip_algorithm="norm")


def _data() -> DataLoader[Any]:
    return DataLoader(Tokens(64), batch_size=8, shuffle=True)


KINDS: dict[str, tuple[Any, Iterable[str]]] = {
    "plain": (partial(TinyLM, SHAPE, "sgd"), LAYOUTS),
    "tied": (Tied, LAYOUTS),
    "frozen": (partial(Frozen, SHAPE), ["pp2", "dp2_pp2_zero1", "tp2_sequence"]),
    "clips_itself": (partial(ClipsItself, SHAPE, "sgd"), ["pp2_zero_bubble", "tp2_pp2", "dp2_pp2_zero3"]),
}


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, (_, names) in KINDS.items() for name in names])
def test_clipped_gradients_are_those_of_one_process(kind: str, name: str) -> None:
    devices, strategy = LAYOUTS[name]
    module, _ = KINDS[kind]
    trainer = {} if kind == "clips_itself" else {"gradient_clip_val": 0.01}
    report = gate(module, _data(), strategy, devices=devices, trainer=trainer)
    assert report.same, str(report)
    assert any(row.quantity == "clipped gradients" for row in report.rows)


@pytest.mark.parametrize("name", ["pp2", "tp2_pp2", "dp2_pp2_zero3"])
def test_clipping_over_an_accumulation_window(name: str) -> None:
    devices, strategy = LAYOUTS[name]
    trainer = {"gradient_clip_val": 0.01, "accumulate_grad_batches": 3}
    report = gate(partial(TinyLM, SHAPE, "sgd"), _data(), strategy, devices=devices, trainer=trainer)
    assert report.same, str(report)


class _Norms(pl.Callback):
    def __init__(self) -> None:
        self.norms: list[float] = []

    def on_before_optimizer_step(self, trainer: pl.Trainer, module: pl.LightningModule, optimizer: Any) -> None:
        strategy = trainer.strategy
        if isinstance(strategy, HybridParallelStrategy) and trainer.world_size > 1:
            owned = strategy.owned_gradients()
            self.norms += [float(total_norm(owned, p, strategy.root_device)) for p in (1.0, 2.0, math.inf)]
        else:
            gradients = [each.grad for each in module.parameters() if each.grad is not None]
            self.norms += [float(nn.utils.get_total_norm(gradients, p)) for p in (1.0, 2.0, math.inf)]


def _norms(strategy: dict[str, Any] | None, batch_size: int) -> list[float]:
    import os

    recorder = _Norms()
    os.environ["PL_GLOBAL_SEED"] = "3"
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    made = HybridParallelStrategy(**(strategy or {}))
    trainer = pl.Trainer(
        accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy=made, max_steps=2, callbacks=[recorder], **quiet
    )
    trainer.fit(Tied(), DataLoader(Tokens(64), batch_size=batch_size))
    return recorder.norms


@cache
def _of_one_process() -> list[float]:
    found: list[float] = run_ranks(_norms, 1, None, 8, process_group=False)[0]
    return found


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_norm_is_the_same_number_on_every_rank(name: str) -> None:
    devices, strategy = LAYOUTS[name]
    copies = 2 if name.startswith("dp2") else 1
    want = _of_one_process()
    found = run_ranks(_norms, devices, strategy, 8 // copies, process_group=False)
    assert len(want) == 6
    assert all(each == found[0] for each in found)
    assert found[0] == pytest.approx(want, rel=1e-5)
