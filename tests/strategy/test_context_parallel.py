"""Sequences split over ranks give the loss, the gradients and the weights of one process, with every other axis."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F

from hybrid_strategy.models.gpt import PART as GPT
from hybrid_strategy.spec.model_shape import ModelShape
from tests.strategy.test_checkpoints import SavingLM
from tests.support.ranks import RankFailedError, run_ranks
from tests.support.training import SHAPE, Case, TinyLM, assemble, compare, train, train_here

GLOBAL_BATCH, STEPS = 16, 2
CONTEXT = {"context_parallel_size": 2}
PIPELINE = {"pipeline_parallel_size": 2, "num_microbatches": 4}
SEQUENCE = {"tensor_parallel_size": 2, "sequence_parallel": True}
GPT_SHAPE = ModelShape(32, 4, 4, 48, 64, 16, 2, family="gpt", gated_mlp=False, bias=True, learned_positions=True)

# name -> (processes, data-parallel size, strategy arguments)
LAYOUTS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "cp2": (2, 1, CONTEXT),
    "cp4": (4, 1, {"context_parallel_size": 4}),
    "cp2_dp2": (4, 2, CONTEXT),
    "cp2_tp2": (4, 1, {**CONTEXT, "tensor_parallel_size": 2}),
    "cp2_tp2_sp": (4, 1, {**CONTEXT, **SEQUENCE}),
    "cp2_pp2_1f1b": (4, 1, {**CONTEXT, **PIPELINE}),
    "cp2_pp2_zbv": (4, 1, {**CONTEXT, **PIPELINE, "schedule": "ZBVZeroBubble", "sharding": "zero1"}),
    "cp2_zero1": (2, 1, {**CONTEXT, "sharding": "zero1"}),
    "cp2_zero2": (2, 1, {**CONTEXT, "sharding": "zero2"}),
    "cp2_dp2_zero3": (4, 2, {**CONTEXT, "sharding": "zero3"}),
}


class TinyGPT(TinyLM):
    """Learned positions, biases, dropout."""

    def __init__(self, shape: ModelShape, dropout: float = 0.0, **arguments: Any) -> None:
        super().__init__(shape, **arguments)
        self.dropout = dropout

    def configure_model(self) -> None:
        if self.model is None:
            with torch.device("meta"):
                self.model = GPT.build(self.shape, dropout=self.dropout)


class TokenLM(TinyLM):
    """Shifts the labels itself, leaves some out, and tells how many tokens the loss is the mean of."""

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> Any:
        ids = batch["input_ids"]
        labels = ids[:, 1:].masked_fill(ids[:, 1:] % 3 == 0, -100)
        logits = self.model(ids)[:, :-1]
        loss = F.cross_entropy(logits.reshape(-1, logits.size(-1)), labels.reshape(-1))
        accuracy = (logits.argmax(-1) == labels).float().mean()
        self.log("accuracy", accuracy)
        return {"loss": loss, "num_tokens": (labels != -100).sum(), "logits": logits.detach()}


class ManualLM(TinyLM):
    """Calls backward itself."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__(shape, optimizer="sgd")
        self.automatic_optimization = False

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> Any:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        optimizer.step()
        return {"loss": loss}


class PredictingLM(TinyLM):
    """Returns whole logits and the likeliest tokens."""

    def predict_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> Any:
        logits = self.model(batch["input_ids"])
        return {"logits": logits, "likeliest": logits.argmax(-1)}


def run(name: str, **more: Any) -> list[dict[str, Any]]:
    world_size, data_parallel_size, arguments = LAYOUTS[name]
    strategy = {**arguments, **more.pop("strategy", {})}
    return train(Case(strategy=strategy, batch_size=GLOBAL_BATCH // data_parallel_size, **{"steps": STEPS, **more}), world_size)


def single(**more: Any) -> list[dict[str, Any]]:
    return train(Case(batch_size=GLOBAL_BATCH, **{"steps": STEPS, **more}), 1)


@pytest.fixture(scope="module")
def reference() -> list[dict[str, Any]]:
    return single()


@pytest.fixture(scope="module")
def gpt_reference() -> list[dict[str, Any]]:
    return single(module=TinyGPT, shape=GPT_SHAPE)


@pytest.mark.parametrize("name", LAYOUTS)
def test_same_numbers_as_one_process(name: str, reference: list[dict[str, Any]]) -> None:
    compare(reference, run(name))


@pytest.mark.parametrize("name", ["cp2", "cp2_tp2_sp", "cp2_pp2_1f1b"])
def test_learned_positions_are_those_of_the_whole_sequence(name: str, gpt_reference: list[dict[str, Any]]) -> None:
    compare(gpt_reference, run(name, module=TinyGPT, shape=GPT_SHAPE))


@pytest.mark.parametrize("kind", ["selective", "full"])
def test_recomputation_attends_to_whole_sequences(kind: str, reference: list[dict[str, Any]]) -> None:
    compare(reference, run("cp2", strategy={"activation_checkpoint": kind}))


@pytest.mark.parametrize("name", ["cp2", "cp2_tp2"])
def test_labels_shifted_by_the_step_and_weighed_by_tokens(name: str) -> None:
    """A label at the border of a chunk belongs to a position of another rank."""
    # the last batch is short, and evaluation comes before training: what it leaves behind must serve training
    options = {"module": TokenLM, "rows": 36, "steps": 3, "trainer": {"num_sanity_val_steps": 1}}
    wanted, got = single(**options), run(name, **options)
    compare(wanted, got)
    for record in got:
        assert record["final"]["val_loss"] == pytest.approx(wanted[0]["final"]["val_loss"], rel=1e-6)


def test_accumulated_batches_and_clipping_by_the_whole_norm() -> None:
    options = {"trainer": {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05}, "module_arguments": {"optimizer": "sgd"}}
    compare(single(**options), run("cp2_zero2", **options))


@pytest.mark.parametrize("name", ["cp2", "cp2_dp2_zero3"])
def test_manual_optimization(name: str) -> None:
    records = run(name, module=ManualLM)
    for steps in zip(*(record["steps"] for record in records), strict=True):
        mean = sum(step["loss"] for step in steps) / len(steps)  # such a step returns the loss of its own samples
        for step in steps:
            step["loss"] = mean
    compare(single(module=ManualLM), records)


def test_tied_embeddings_of_a_pipeline(reference: list[dict[str, Any]]) -> None:
    options = {"shape": dataclasses.replace(SHAPE, tied_embeddings=True)}
    compare(single(**options), run("cp2_pp2_1f1b", **options))


def test_dropout_is_replayed_by_recomputation() -> None:
    """Masks cannot be those of one process; each rank's own must come again when it recomputes."""
    options = {"module": TinyGPT, "shape": GPT_SHAPE, "module_arguments": {"dropout": 0.2}}
    kept = run("cp2", **options)
    compare(kept, run("cp2", **options, strategy={"activation_checkpoint": "full"}))
    with pytest.raises(AssertionError):
        compare(single(**options), kept)


@pytest.mark.parametrize(("source", "target"), [("single", "cp2_zero2"), ("cp2_zero2", "single")])
def test_a_checkpoint_goes_on_in_the_other_layout(
    source: str, target: str, tmp_path: Path, straight: list[dict[str, Any]]
) -> None:
    def go(name: str, steps: int, **more: Any) -> list[dict[str, Any]]:
        arguments = {"save_to": more.pop("save_to", ""), "save_at": "end"}
        options = {"steps": steps, "module": SavingLM, "module_arguments": arguments, **more}
        return single(**options) if name == "single" else run(name, **options)

    path = str(tmp_path / "saved")
    go(source, 2, save_to=path)
    records = go(target, 4, checkpoint=path)
    loaded = assemble(records, lambda record: record["initial"])
    for name, value in assemble(straight, lambda record: record["steps"][1]["weights"]).items():
        torch.testing.assert_close(loaded[name], value, rtol=1e-5, atol=1e-5)
    rest = [{"initial": {}, "steps": [{**each, "logged": {}} for each in record["steps"][2:]]} for record in straight]
    compare(rest, [{"initial": {}, "steps": [{**each, "logged": {}} for each in record["steps"]]} for record in records])


@pytest.fixture(scope="module")
def straight() -> list[dict[str, Any]]:
    return single(steps=4)


def predict_here(strategy: dict[str, Any]) -> Any:
    predictions: list[Any] = []

    class Predict(pl.Callback):
        def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
            batch = next(iter(trainer.train_dataloader))
            predictions.append(trainer.strategy.predict_step(batch, 0))

    train_here(Case(strategy=strategy, module=PredictingLM, steps=1, trainer={"callbacks": [Predict()]}))
    return predictions[0]


def test_what_a_step_returns_is_whole() -> None:
    (wanted,) = run_ranks(predict_here, 1, {}, process_group=False)
    for got in run_ranks(predict_here, 2, CONTEXT, process_group=False):
        assert type(got["logits"]) is torch.Tensor
        torch.testing.assert_close(got["logits"], wanted["logits"], rtol=1e-4, atol=1e-5)
        assert (got["likeliest"] == wanted["likeliest"]).float().mean() > 0.98


def test_a_sequence_that_cannot_be_cut_is_refused() -> None:
    shape = dataclasses.replace(SHAPE, sequence_length=18)
    with pytest.raises(RankFailedError, match="sequences of 18 positions, which is not a multiple of 4"):
        run("cp2", shape=shape, steps=1)
