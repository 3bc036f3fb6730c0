"""A language model as an entirely ordinary LightningModule: it knows nothing of parallelism."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from math import isfinite
from typing import Any, cast

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from hybrid_strategy.errors import ConfigError, did_you_mean, message
from hybrid_strategy.modules.first_values import give_first_values
from hybrid_strategy.planning.learning_rate import learning_rate_at
from hybrid_strategy.registry import find
from hybrid_strategy.spec.model_shape import ModelShape
from hybrid_strategy.spec.training import LearningRateSpec, OptimizerSpec

Batch = dict[str, Tensor]
"""`input_ids` and `labels`, both `[b, s]`; `labels` are the next tokens, -100 where there is none."""

_OPTIMIZERS = ("adamw", "sgd")


class LanguageModel(LightningModule):
    """Next-token prediction.

    The first values depend on the seed of `lightning.seed_everything` (0 without it) and on parameters' names only.

    Args:
        shape: sizes of the model; `shape.family` names its file in `models/`.
        optimizer: kind and settings; its `learning_rate` is the peak of the schedule.
        learning_rate: warm-up and decay; `total_steps` 0 means the steps of the Trainer.
        options: further arguments of the family, e.g. `rope_theta`.
    """

    def __init__(
        self,
        shape: ModelShape,
        optimizer: OptimizerSpec | None = None,
        learning_rate: LearningRateSpec | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.shape, self.options = shape, dict(options or {})
        self.optimizer_spec, self.learning_rate_spec = optimizer or OptimizerSpec(), learning_rate or LearningRateSpec()
        self.model: nn.Module | None = None

    def configure_model(self) -> None:
        """Builds `model`, once; without values where the strategy makes its parameters real itself."""
        if self.model is not None:
            return
        device = torch.get_default_device()
        with torch.device("meta"):
            self.model = cast(nn.Module, find("models", self.shape.family, "model.family").build(self.shape, **self.options))
        if not self._strategy_materialises():
            give_first_values(self.model, int(os.environ.get("PL_GLOBAL_SEED", "0")), device)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Logits `[b, s, vocab]`."""
        return cast(Tensor, cast(nn.Module, self.model)(input_ids))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = self._loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("val_loss", self._loss(batch), prog_bar=True)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("test_loss", self._loss(batch))

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The likeliest next tokens, `[b, s]`."""
        return self.forward(batch["input_ids"]).argmax(-1)

    def configure_optimizers(self) -> Any:
        """Weight decay falls on matrices only; the learning rate changes with every optimizer step."""
        optimizer = self._optimizer()
        schedule = partial(learning_rate_at, spec=self._schedule(), peak=1.0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": LambdaLR(optimizer, schedule), "interval": "step"}}

    def _loss(self, batch: Batch) -> Tensor:
        logits = self.forward(batch["input_ids"])
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())

    def _optimizer(self) -> Optimizer:
        spec = self.optimizer_spec
        parameters = [each for each in self.parameters() if each.requires_grad]
        groups = [
            {"params": [each for each in parameters if each.ndim >= 2], "weight_decay": spec.weight_decay},
            {"params": [each for each in parameters if each.ndim < 2], "weight_decay": 0.0},
        ]
        groups = [group for group in groups if group["params"]]
        if spec.name.lower() == "adamw":
            return AdamW(groups, spec.learning_rate, spec.betas, spec.eps, foreach=spec.foreach, fused=spec.fused)
        if spec.name.lower() == "sgd":
            return SGD(groups, spec.learning_rate, spec.momentum, foreach=spec.foreach, fused=spec.fused)
        raise ConfigError(
            message("optimizer.name", spec.name, "there is no such optimizer", "", did_you_mean(spec.name, _OPTIMIZERS))
        )

    def _schedule(self) -> LearningRateSpec:
        """The schedule with the number of steps filled in; an endless run has none, which only a constant rate bears."""
        spec = self.learning_rate_spec
        if spec.total_steps or spec.schedule == "constant":
            return spec
        steps = self.trainer.estimated_stepping_batches
        return replace(spec, total_steps=int(steps) if isfinite(steps) else 0)

    def _strategy_materialises(self) -> bool:
        try:
            strategy: object = self.trainer.strategy
        except RuntimeError:  # no Trainer: the module is used by itself
            return False
        return bool(getattr(strategy, "materialises_meta", False))
