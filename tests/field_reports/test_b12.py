"""B12, kind of fault: what is whole on every tensor rank gets a part of its gradient on each, and the copies drift apart.

Norms between sub-blocks, the last norm, biases behind row-split layers: their gradients are summed before anything reads them,
and after many steps all copies are the same bits.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from hybrid_strategy.models.gpt import PART as GPT
from tests.support.gate import gate
from tests.support.ranks import run_ranks
from tests.support.training import SHAPE, Case, TinyLM, Tokens, train_here

SPLIT = {"tensor_parallel_size": 2, "sequence_parallel": True}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2": (2, SPLIT),
    "dp2_tp2": (4, SPLIT),
    "tp2_pp2": (4, {**SPLIT, "pipeline_parallel_size": 2, "num_microbatches": 2}),
}


class Gpt(TinyLM):
    """Has biases and norms with two parameters."""

    def configure_model(self) -> None:
        if self.model is None:
            with torch.device("meta"):
                self.model = GPT.build(GPT.tiny)


@pytest.mark.parametrize("family", ["llama", "gpt"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_gradients_of_whole_parameters(name: str, family: str) -> None:
    devices, strategy = LAYOUTS[name]
    shape = SHAPE if family == "llama" else GPT.tiny
    data = DataLoader(Tokens(32, shape.sequence_length, shape.vocab_size), batch_size=4)
    module = partial(TinyLM, SHAPE) if family == "llama" else partial(Gpt, GPT.tiny)
    # in fp64, where a missing part of a sum cannot hide behind what Adam makes of rounding in the step before
    trainer = {"gradient_clip_val": 0.1, "precision": "64-true"}
    report = gate(module, data, strategy, devices=devices, steps=2, trainer=trainer)
    assert report.same, str(report)


class _Copies(pl.Callback):
    """Keeps the norms' weights and the gradients that the user's hook sees."""

    def __init__(self) -> None:
        self.seen: list[dict[str, torch.Tensor]] = []
        self.weights: dict[str, torch.Tensor] = {}

    def on_before_optimizer_step(self, trainer: pl.Trainer, module: pl.LightningModule, optimizer: Any) -> None:
        norms = {name: each for name, each in module.named_parameters() if "norm" in name}
        self.seen.append({name: each.grad.clone() for name, each in norms.items() if each.grad is not None})

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.weights = {name: each.detach().clone() for name, each in module.named_parameters() if "norm" in name}


def _train() -> tuple[list[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    copies = _Copies()
    train_here(Case(strategy=SPLIT, trainer={"callbacks": [copies]}, rows=160, steps=20))
    return copies.seen, copies.weights


def test_copies_are_the_same_bits_after_twenty_steps_and_in_every_hook() -> None:
    first, second = run_ranks(_train, 2, process_group=False)
    assert len(first[0]) == 20
    for left, right in (*zip(first[0], second[0], strict=True), (first[1], second[1])):
        assert left.keys() == right.keys()
        assert "model.norm.weight" in left
        assert all(torch.equal(left[name], right[name]) for name in left)


class RowBias(pl.LightningModule):
    """A user's own model: the row-split layer has a bias, and a norm that no plan names follows it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Embedding(64, 16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16), nn.LayerNorm(16))
        self.head = nn.Linear(16, 64)

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        logits = self.head(self.model(batch["input_ids"]))
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_bias_behind_a_row_split_layer() -> None:
    strategy = {"tensor_parallel_size": 2, "parallel_plan": {"tensor": {"1": "colwise", "3": "rowwise"}}}
    report = gate(RowBias, DataLoader(Tokens(32), batch_size=8), strategy, devices=2, steps=3)
    assert report.same, str(report)
