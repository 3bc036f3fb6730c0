"""Hooks, steps and models that draw random numbers for the samples: the same on all ranks that work on them."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hybrid_strategy import ParallelPlan
from hybrid_strategy.strategy.peers import _Print
from tests.contract.items import Item, compare_item
from tests.contract.layouts import LAYOUTS, PLAIN, ContractLayout
from tests.contract.models import VOCAB, Block, LossRecorder, Model, Module, loader, make_trainer, quiet, row_losses
from tests.support.ranks import run_ranks

SEQUENCE_PLAN = ParallelPlan(
    units=("embed", "layers.*", "norm", "head"),
    tensor={
        "embed": "sequence_split",
        "layers.*.norm": "sequence_norm",
        "layers.*.mlp.up": "colwise",
        "layers.*.mlp.down": "rowwise",
        "norm": "sequence_norm",
        "head": "vocab_head",
    },
)
SEQUENCE = {"tensor_parallel_size": 2, "sequence_parallel": True, "parallel_plan": SEQUENCE_PLAN}
LAYOUTS_WITH_PEERS = [
    *(LAYOUTS[name] for name in ("pp2_1f1b", "pp2_interleaved", "cp2", "tp2_pp2")),
    ContractLayout("tp2_sp", 2, 1, {**SEQUENCE, "num_microbatches": 2}),
]


class Drawing(Block):
    """Draws numbers that it does not use, as dropout would: ranks with other layers draw other numbers of them."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            torch.rand(5), np.random.rand(), random.random()
        return super().forward(x)


class NoisyModel(Model):
    """Scales the hidden state of each sample by a number that is drawn, and the logits by the same one."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.__class__ = Drawing

    def forward(self, ids: Tensor, draw: Any) -> Tensor:
        scale = 1 + draw("model").view(-1, 1, 1)
        x = self.embed(ids) * scale
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x)) * scale


class Mixing(Module):
    """Moves inputs and labels of each sample by numbers that are drawn in hooks and in the step, where none are given."""

    def __init__(self, given: dict[Any, float] | None = None) -> None:
        super().__init__()
        self.model = NoisyModel()
        self.given, self.drawn = given, dict[Any, float]()

    def draw(self, place: str, batch: dict[str, Tensor]) -> Tensor:
        keys = [(place, self.trainer.training, self.global_step, int(row)) for row in batch["row"]]
        if self.given is not None:
            return torch.tensor([self.given[key] for key in keys])
        sources = {"before": lambda count: np.random.rand(count), "step": lambda count: [random.random() for _ in range(count)]}
        drawn = [float(each) for each in sources.get(place, torch.rand)(len(keys))]
        self.drawn.update(zip(keys, drawn, strict=True))
        return torch.tensor(drawn)

    def moved(self, place: str, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        by = (self.draw(place, batch) * VOCAB).long().view(-1, 1)
        return {**batch, **{key: (batch[key].clamp(min=0) + by) % VOCAB for key in ("ids", "labels")}}

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return self.moved("before", batch)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return self.moved("after", batch)

    def on_after_backward(self) -> None:
        for each in self.parameters():  # noise for gradients, of no weight here: stages draw for other parameters
            torch.randn_like(each), np.random.rand()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        batch = self.moved("step", batch)
        return row_losses(self.model(batch["ids"], lambda place: self.draw(place, batch)), batch["labels"]).mean()

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val", self.training_step(batch, batch_idx))


def _train(layout: ContractLayout, given: dict[Any, float] | None) -> Any:
    with quiet():
        module, losses = Mixing(given), LossRecorder()
        trainer = make_trainer(layout, max_epochs=2, callbacks=[losses])
        trainer.fit(module, loader(layout, 24), loader(layout, 9, seed=2))
    return module.drawn, [*losses.losses, float(trainer.callback_metrics["val"])]


@pytest.mark.parametrize("layout", LAYOUTS_WITH_PEERS, ids=lambda each: each.name)
def test_what_is_drawn_for_samples_is_the_same_on_all_ranks_that_work_on_them(layout: ContractLayout) -> None:
    ranks = run_ranks(_train, layout.world_size, layout, None, process_group=False)
    drawn = ranks[0][0]
    assert len(set(drawn.values())) > 0.99 * len(drawn)
    assert all(drawn[key] == number for found, _ in ranks for key, number in found.items())
    together = {key: number for found, _ in ranks for key, number in found.items()}
    _, wanted = run_ranks(_train, 1, PLAIN, together, process_group=False)[0]
    assert ranks[0][1] == pytest.approx(wanted, rel=2e-6)


class OwnGenerator(Module):
    """Changes its samples on each rank in another way, as a generator that nobody has seeded alike does."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        moved = batch["ids"].roll(1 + self.global_rank, dims=1)
        return row_losses(self.model(moved), batch["labels"]).mean()


def _own_generator(layout: ContractLayout, folder: str) -> Any:
    make_trainer(layout, max_steps=1).fit(OwnGenerator(), loader(layout, 8))
    return {}


@pytest.mark.parametrize("layout", ["tp2", "pp2_1f1b"])
def test_inputs_that_every_rank_draws_for_itself_are_refused(layout: str) -> None:
    words = "training_step is 'the inputs of its model'"
    result, why = compare_item(Item("own_generator", 3, _own_generator, refused={layout: words}), LAYOUTS[layout])
    assert result == "refused", "\n".join(why[:10])


class AsItLikes(Module):
    """Takes its batch apart and changes it in place."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        labels = batch.pop("labels")
        labels += 1
        labels %= VOCAB
        return row_losses(self.model(**{key: each for key, each in batch.items() if key == "ids"}), labels).mean()


def _as_it_likes(layout: ContractLayout, folder: str) -> Any:
    losses = LossRecorder()
    make_trainer(layout, max_epochs=1, callbacks=[losses]).fit(AsItLikes(), loader(layout, 24))
    return {"losses": losses.losses}


@pytest.mark.parametrize("layout", ["single", "pp2_1f1b", "pp2_interleaved"])
def test_a_step_may_do_with_its_batch_what_it_likes(layout: str) -> None:
    result, why = compare_item(Item("as_it_likes", 3, _as_it_likes), LAYOUTS[layout])
    assert result == "same", "\n".join(why[:10])


def test_prints_tell_other_values_and_bear_rounding() -> None:
    def of(values: Tensor) -> _Print:
        return _Print.of(("x",), values)

    values, mask = torch.randn(90, 90), torch.zeros(4, 4).masked_fill(torch.ones(4, 4).triu(1).bool(), -torch.inf)
    assert of(values).is_like(of(values * (1 + 1e-7)), 1e-4)
    assert not of(values).is_like(of(values * (1 + 1e-7)), 0.0)
    assert not of(values).is_like(of(torch.randn(90, 90)), 1e-4)
    assert of(mask).is_like(of(mask.clone()), 0.0)
    assert not of(torch.arange(9)).is_like(of(torch.arange(9).flip(0)), 1e-4)
