"""The language model as Lightning's plain Trainer sees it."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader

from hybrid_strategy.errors import ConfigError
from hybrid_strategy.modules.language_model import LanguageModel
from hybrid_strategy.parallel.materialise import Initialiser
from hybrid_strategy.spec.model_shape import ModelShape
from hybrid_strategy.spec.training import LearningRateSpec, OptimizerSpec

SHAPE = ModelShape(16, 2, 4, 20, 24, 8)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Two threads on a busy machine wait for each other longer than they compute."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def loader() -> DataLoader[dict[str, torch.Tensor]]:
    tokens = torch.randint(0, 24, (12, 9), generator=torch.Generator().manual_seed(0))
    return DataLoader([{"input_ids": row[:-1], "labels": row[1:]} for row in tokens], batch_size=4)


def trainer(**options: Any) -> Trainer:
    return Trainer(
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )


@pytest.mark.filterwarnings("ignore:.*does not have many workers.*", "ignore:.*LeafSpec.*:FutureWarning")
def test_trains_and_evaluates_under_plain_lightning() -> None:
    module = LanguageModel(SHAPE, OptimizerSpec(learning_rate=1e-2), LearningRateSpec(warmup_steps=2))
    run = trainer(max_steps=3)
    run.fit(module, loader(), loader())
    first = float(run.callback_metrics["val_loss"])
    run = trainer(max_steps=30, max_epochs=-1)
    run.fit(module, loader(), loader())
    assert float(run.callback_metrics["val_loss"]) < first - 0.1
    assert run.callback_metrics.keys() == {"train_loss", "val_loss"}
    assert "test_loss" in run.test(module, loader(), verbose=False)[0]
    assert run.predict(module, loader())[0].shape == (4, 8)


def test_configure_model_is_layout_independent_and_idempotent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_GLOBAL_SEED", "3")
    module = LanguageModel(SHAPE)
    module.configure_model()
    model = module.model
    module.configure_model()
    assert module.model is model
    initialiser = Initialiser(model, 3)
    for name, parameter in model.named_parameters():
        assert torch.equal(initialiser.whole(name), parameter)


def test_leaves_the_values_to_a_strategy_that_makes_them() -> None:
    module = LanguageModel(SHAPE, options={"rope_theta": 5e5})
    module._trainer = SimpleNamespace(strategy=SimpleNamespace(materialises_meta=True))
    module.configure_model()
    assert all(each.is_meta for each in module.model.parameters())
    assert module.model.rope_theta == 5e5


def test_decay_falls_on_matrices_and_the_rate_follows_the_schedule() -> None:
    spec = OptimizerSpec(learning_rate=0.5, weight_decay=0.3, eps=1e-6)
    module = LanguageModel(SHAPE, spec, LearningRateSpec(warmup_steps=2, min_ratio=0.0, total_steps=4))
    module.configure_model()
    module.model.lm_head.weight.requires_grad_(False)
    made = module.configure_optimizers()
    optimizer, scheduler = made["optimizer"], made["lr_scheduler"]["scheduler"]
    matrices, others = optimizer.param_groups
    assert (matrices["weight_decay"], others["weight_decay"], matrices["eps"]) == (0.3, 0.0, 1e-6)
    assert len(matrices["params"]) == 1 + 2 * 7
    assert len(others["params"]) == 5
    rates = []
    for _ in range(5):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates == pytest.approx([0.25, 0.5, 0.5, 0.25, 0.0])


def test_sgd_and_unknown_optimizers() -> None:
    constant = LearningRateSpec("constant")
    module = LanguageModel(SHAPE, OptimizerSpec("sgd", momentum=0.9), constant)
    module.configure_model()
    assert module.configure_optimizers()["optimizer"].defaults["momentum"] == 0.9
    module = LanguageModel(SHAPE, OptimizerSpec("adam"), constant)
    module.configure_model()
    with pytest.raises(ConfigError, match=r"optimizer.name is 'adam': there is no such optimizer. Did you mean 'adamw'"):
        module.configure_optimizers()
