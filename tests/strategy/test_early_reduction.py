"""Gradients that go out while the backward pass runs: the same numbers, as many messages, and none that hangs."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from hybrid_strategy import HybridParallelStrategy
from hybrid_strategy.errors import ConfigError, ModelError
from hybrid_strategy.parallel.sharding import _early
from hybrid_strategy.strategy.options import make_options
from tests.support.gate import gate
from tests.support.ranks import run_ranks
from tests.support.training import Case, TinyLM, Tokens, compare, train_here

PIPELINE = {"pipeline_parallel_size": 2, "num_microbatches": 4}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp2": (2, {"num_microbatches": 2}),
    "dp2_zero1": (2, {"sharding": "zero1"}),
    "dp2_zero2": (2, {"sharding": "zero2", "num_microbatches": 2}),
    "dp2_pp2": (4, PIPELINE),
    "dp2_pp2_interleaved_zero1": (4, {**PIPELINE, "schedule": "Interleaved1F1B", "sharding": "zero1"}),
    "dp2_pp2_zbv_zero2": (4, {**PIPELINE, "schedule": "ZBVZeroBubble", "sharding": "zero2"}),
    "dp2_tp2_sp": (4, {"tensor_parallel_size": 2, "sequence_parallel": True}),
}


class SmallBuckets:
    """Many messages where the model is small."""

    def __enter__(self) -> None:
        self.before, _early.EARLY_BUCKET_BYTES = _early.EARLY_BUCKET_BYTES, 4096

    def __exit__(self, *_: object) -> None:
        _early.EARLY_BUCKET_BYTES = self.before


@pytest.mark.parametrize("name", LAYOUTS)
def test_gradients_in_many_small_messages(name: str) -> None:
    devices, strategy = LAYOUTS[name]
    data = DataLoader(Tokens(32), batch_size=4, shuffle=True)
    report = gate(TinyLM, data, strategy, devices=devices, steps=3, plant=SmallBuckets)
    assert report.same, str(report)


@pytest.mark.parametrize("name", ["dp2", "dp2_pp2_zbv_zero2"])
def test_windows_of_several_batches_with_a_short_last_one(name: str) -> None:
    devices, strategy = LAYOUTS[name]
    data = DataLoader(Tokens(56), batch_size=4, shuffle=True)  # seven batches a rank: windows of 3, 3 and 1
    report = gate(TinyLM, data, strategy, devices=devices, steps=4, trainer={"accumulate_grad_batches": 3}, plant=SmallBuckets)
    assert report.same, str(report)


class OneRankLacksGradients(TinyLM):
    """A batch of odd content does not touch the first layer's MLP: on one rank its gradient is missing."""

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        assert self.model is not None
        mlp = self.model.get_submodule("layers.0.mlp")
        skip = int(batch["input_ids"][0, 0]) % 2 == 1
        original = mlp.forward
        if skip:
            mlp.forward = torch.zeros_like
        try:
            return super().training_step(batch, batch_idx)
        finally:
            mlp.forward = original


def _early_and_late(strategy: dict[str, Any]) -> list[dict[str, Any]]:
    records = []
    want = _early.EarlyReduction.want
    for early in (True, False):
        if not early:
            _early.EarlyReduction.want = lambda *_: None  # type: ignore[method-assign]
        try:
            with SmallBuckets():
                case = Case(strategy=strategy, module=OneRankLacksGradients, rows=12, batch_size=1, steps=6)
                records.append(train_here(case))
        finally:
            _early.EarlyReduction.want = want  # type: ignore[method-assign]
    return records


@pytest.mark.parametrize("sharding", ["ddp", "zero1", "zero2"])
def test_a_gradient_that_only_one_rank_has(sharding: str) -> None:
    ranks = run_ranks(_early_and_late, 2, {"sharding": sharding}, process_group=False)
    compare([late for _, late in ranks], [early for early, _ in ranks])


def _order_of_messages(strategy: dict[str, Any]) -> list[str]:
    """What this rank did, in order: `b` a backward pass of a parameter, `r` a message of gradients."""
    events: list[str] = []
    start = _early.EarlyReduction._send
    arrived = _early.EarlyReduction.arrived

    def sent(self: Any) -> None:
        events.append("r")
        start(self)

    def came(self: Any, parameter: torch.Tensor) -> None:
        events.append("b")
        arrived(self, parameter)

    _early.EarlyReduction._send, _early.EarlyReduction.arrived = sent, came  # type: ignore[method-assign]
    try:
        with SmallBuckets():
            train_here(Case(strategy=strategy, steps=1))
    finally:
        _early.EarlyReduction._send, _early.EarlyReduction.arrived = start, arrived  # type: ignore[method-assign]
    return events


@pytest.mark.parametrize("sharding", ["ddp", "zero1", "zero2"])
def test_messages_leave_before_the_backward_pass_is_over(sharding: str) -> None:
    for events in run_ranks(_order_of_messages, 2, {"sharding": sharding}, process_group=False):
        first, last = events.index("r"), len(events) - 1 - events[::-1].index("b")
        assert events.count("r") > 3
        assert first < last / 2


def _types_of_messages(strategy: dict[str, Any], precision: str) -> tuple[set[torch.dtype], list[float]]:
    seen: set[torch.dtype] = set()
    names = ("all_reduce", "reduce_scatter_single")
    originals = {name: getattr(dist, name) for name in names}

    def watch(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if max(each.numel() for each in args if isinstance(each, torch.Tensor)) > 512:
                seen.update(each.dtype for each in args if isinstance(each, torch.Tensor))
            return originals[name](*args, **kwargs)

        return call

    for name in names:
        setattr(dist, name, watch(name))
    try:
        record = train_here(Case(strategy=strategy, trainer={"precision": precision, "limit_val_batches": 0}, steps=3))
    finally:
        for name in names:
            setattr(dist, name, originals[name])
    return seen, [each["loss"] for each in record["steps"]]


@pytest.mark.parametrize("sharding", ["ddp", "zero2", "zero3"])
@pytest.mark.parametrize(
    ("precision", "asked", "wanted"),
    [
        ("32-true", None, torch.float32),
        ("32-true", "bfloat16", torch.bfloat16),
        ("bf16-true", None, torch.bfloat16),
        ("bf16-true", "float32", torch.float32),
    ],
)
def test_gradients_travel_in_the_type_asked_for(sharding: str, precision: str, asked: str | None, wanted: torch.dtype) -> None:
    plain = run_ranks(_types_of_messages, 2, {"sharding": sharding}, precision, process_group=False)
    found = run_ranks(_types_of_messages, 2, {"sharding": sharding, "reduce_dtype": asked}, precision, process_group=False)
    for (seen, losses), (_, own) in zip(found, plain, strict=True):
        assert seen == {wanted}
        assert losses == pytest.approx(own, rel=1e-3)


@pytest.mark.parametrize("name", ["float16", "fp8", "int8"])
def test_other_types_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"reduce_dtype is '{name}': .*(bfloat16|float32)"):
        make_options(num_microbatches=None, micro_batch_size=None, reduce_dtype=name)


class _Types(pl.Callback):
    """In which type gradients travel, by fit."""

    def __init__(self) -> None:
        self.seen: list[torch.dtype | None] = []

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.seen.append(trainer.strategy.made.sharding.reduce_dtype)


def _second_trainer() -> list[torch.dtype | None]:
    types, module = _Types(), TinyLM()
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    for asked in (None, "bfloat16", "float32"):
        strategy = HybridParallelStrategy(reduce_dtype=asked)
        trainer = pl.Trainer(accelerator="cpu", devices=2, strategy=strategy, max_steps=1, callbacks=[types], **quiet)
        trainer.fit(module, DataLoader(Tokens(8), batch_size=4))
    return types.seen


def test_a_second_trainer_of_the_same_module_has_its_own_type() -> None:
    for seen in run_ranks(_second_trainer, 2, process_group=False):
        assert seen == [None, torch.bfloat16, torch.float32]


def _other_checkpointing() -> str:
    module = TinyLM()
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    for kind in ("none", "full"):
        strategy = HybridParallelStrategy(activation_checkpoint=kind)
        trainer = pl.Trainer(accelerator="cpu", devices=2, strategy=strategy, max_steps=1, **quiet)
        try:
            trainer.fit(module, DataLoader(Tokens(8), batch_size=4))
        except ModelError as error:
            return str(error)
    return ""


def test_what_a_second_trainer_cannot_change_is_refused() -> None:
    for text in run_ranks(_other_checkpointing, 2, process_group=False):
        assert "activation checkpoint none" in text
        assert "activation checkpoint full" in text
