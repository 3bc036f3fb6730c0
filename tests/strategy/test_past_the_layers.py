"""Steps and hooks that reach past the model's forward: right, or refused by name; never other numbers."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hybrid_strategy.errors import ModelError
from hybrid_strategy.parallel.stage_context import StageContext
from hybrid_strategy.parallel.stage_now import StageNow
from hybrid_strategy.parallel.stages import cut_model
from hybrid_strategy.strategy.outputs import combine_outputs
from tests.contract.items import Item, compare_item
from tests.contract.layouts import LAYOUTS, ContractLayout
from tests.contract.models import VOCAB, LossRecorder, Model, Module, loader, make_trainer, row_losses


class Reaching(Module):
    """Samples in a hook; validates in the middle of an accumulation window."""

    def __init__(self) -> None:
        super().__init__()
        self.sampled: list[float] = []

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val", self.loss(batch))

    def on_validation_end(self) -> None:
        ids = torch.arange(24).view(2, 12) % VOCAB
        with torch.no_grad():
            self.sampled.append(float(self.model(ids).square().sum() + self.model.layers[1](torch.ones(1, 2, 8)).sum()))


class Norm(Reaching):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.loss(batch) + 0.01 * sum(each.square().sum() for each in self.model.parameters())


class NowAndThen(Reaching):
    """One weight is read before its layer runs, another after, and not in every step."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        if batch_idx == 1:
            return 0.1 * self.model.layers[0].mlp["up"].weight.norm() + self.loss(batch)
        loss = self.loss(batch)
        return loss if batch_idx else loss + 0.1 * self.model.layers[2].mlp["down"].weight.abs().sum()


class TiedByHand(Reaching):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        hidden = self.model.embed(batch["ids"])
        for layer in self.model.layers:
            hidden = layer(hidden)
        return row_losses(F.linear(self.model.norm(hidden), self.model.embed.weight), batch["labels"]).mean()


def _train(kinds: list[type[Reaching]], layout: ContractLayout) -> Any:
    found = {}
    for kind in kinds:
        module, losses = kind(), LossRecorder()
        trainer = make_trainer(layout, max_epochs=2, accumulate_grad_batches=2, val_check_interval=1, callbacks=[losses])
        trainer.fit(module, loader(layout, 24), loader(layout, 9, seed=2))
        found[kind.__name__] = (losses.losses, module.sampled, float(trainer.callback_metrics["val"]))
    return found


def _everything(layout: ContractLayout, folder: str) -> Any:
    return _train([Norm, NowAndThen, TiedByHand], layout)


def _norm(layout: ContractLayout, folder: str) -> Any:
    return _train([Norm], layout)


def test_weights_used_outside_of_their_layers_are_whole_where_rows_of_them_are_held() -> None:
    result, why = compare_item(Item("past_the_layers", 3, _everything, relative=2e-6), LAYOUTS["dp2_zero3"])
    assert result == "same", "\n".join(why[:10])


def test_a_loss_made_of_pieces_of_weights_is_refused() -> None:
    words = "a step used a weight of a layer that tensor-parallel ranks split"
    result, why = compare_item(Item("pieces_in_the_loss", 3, _norm, refused={"tp2": words}), LAYOUTS["tp2"])
    assert result == "refused", "\n".join(why[:10])


class Counting(Module):
    """Counts rows on the module, after the model has run."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.zeros(()))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.rows += len(batch["row"])
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("rows", self.rows)


def _counted(layout: ContractLayout, folder: str) -> Any:
    trainer, module = make_trainer(layout, max_epochs=1), Counting()
    trainer.fit(module, loader(layout, 16))
    trainer.save_checkpoint(f"{folder}/counted.ckpt")
    loaded = Counting()
    make_trainer(layout).validate(loaded, loader(layout, 8), ckpt_path=f"{folder}/counted.ckpt", verbose=False)
    return {"rows": float(loaded.rows)}


@pytest.mark.parametrize("layout", ["pp2_1f1b", "pp2_zbv"])
def test_what_a_step_counts_in_a_pipeline_is_saved_by_the_rank_that_counts(layout: str) -> None:
    result, why = compare_item(Item("counted", 3, _counted), LAYOUTS[layout])
    assert result == "same", "\n".join(why[:10])


def _own_data(layout: ContractLayout, folder: str) -> Any:
    seed = int(os.environ["RANK"]) // layout.data_parallel_size
    make_trainer(layout, max_steps=1).fit(Module(), loader(layout, 8, seed=seed))
    return {}


@pytest.mark.parametrize("layout", ["tp2", "pp2_1f1b"])
def test_data_that_every_rank_makes_otherwise_is_refused(layout: str) -> None:
    result, why = compare_item(Item("own_data", 3, _own_data, refused={layout: "dataset is 'another"}), LAYOUTS[layout])
    assert result == "refused", "\n".join(why[:10])


def _second_half() -> tuple[Model, StageContext, StageNow]:
    """A model that holds its last units alone, and the stage that they are."""
    model, context = Model(), StageContext()
    units = ["embed", *(f"layers.{index}" for index in range(4)), "norm", "head"]
    cut_model(model, units, {3, 4, 5, 6}, context)
    return model, context, StageNow(3, 7, True, torch.ones(2, 12, 8))


def test_a_step_in_a_pipeline_cannot_leave_weights_of_other_ranks_out() -> None:
    model, context, now = _second_half()
    assert len(list(model.parameters())) == 2 * 6 + 4
    with context.play(now):
        assert next(model.parameters()).device == torch.device("cpu")
        assert sum(each.numel() for each in model.parameters()) == sum(each.numel() for each in Model().parameters())
        assert [name for name, _ in model.named_parameters()] == [name for name, _ in Model().named_parameters()]
        with pytest.raises(ModelError, match="a parameter of another pipeline rank"):
            sum(each.square().sum() for each in model.parameters())
        assert (model.embed.weight.dtype, model.layers[0].norm.eps) == (torch.float32, 1e-5)
        with pytest.raises(ModelError, match="a parameter of another pipeline rank"):
            model.embed.weight.square()
        with pytest.raises(ModelError, match="the parts of a unit instead of calling it"):
            list(model.layers[0])
        with pytest.raises(AttributeError, match="'forward_hooks' of unit 0"):
            _ = model.embed.forward_hooks
    assert not hasattr(model.embed, "weight")


def test_a_step_in_a_pipeline_cannot_run_the_model_on_two_inputs() -> None:
    model, context, now = _second_half()
    with context.play(now):
        first = model(torch.zeros(2, 12, dtype=torch.long))
        assert torch.equal(model(torch.zeros(2, 12, dtype=torch.long)), first)
        with pytest.raises(ModelError, match="it runs twice in one step with other inputs"):
            model(torch.ones(2, 12, dtype=torch.long))


def test_a_list_of_several_kinds_has_no_item_a_sample() -> None:
    halves = [[torch.tensor([1.0, 2.0]), 3.5], [torch.tensor([3.0, 4.0]), 3.5]]
    values, number = combine_outputs(halves, [2, 2])
    assert values.tolist() == [1.0, 2.0, 3.0, 4.0]
    assert number == 3.5
    assert combine_outputs([["a", "b"], ["c", "d"]], [2, 2]) == ["a", "b", "c", "d"]
