"""A module whose parameter groups differ in everything, and what its optimizer holds, by parameter name, at every step."""

from __future__ import annotations

import random
from typing import Any

import lightning.pytorch as pl
import torch
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR

from tests.support.resuming import DroppingLM, Resumed

KINDS = ("embeddings", "matrices", "vectors", "none")
"""`none` holds no parameter on any rank; a stage of a pipeline lacks others."""


class GroupedLM(DroppingLM):
    """Groups of different rates, decays and betas.

    Args:
        order: of the groups on each rank: `same`, or `shuffled` differently on every rank, as a set of names would be.
        schedule: `lambda` (of each group its own) or `exponential` (from the rate the group has).
    """

    def __init__(self, order: str = "same", schedule: str = "lambda", **arguments: Any) -> None:
        super().__init__(dropout=0.0, **arguments)
        self.order, self.schedule = order, schedule

    def configure_optimizers(self) -> Any:
        groups: dict[str, dict[str, Any]] = {
            "embeddings": {"params": [], "lr": 1e-4, "weight_decay": 0.0, "betas": (0.8, 0.99)},
            "matrices": {"params": [], "lr": 1e-3, "weight_decay": 0.1},
            "vectors": {"params": [], "lr": 2e-3, "weight_decay": 0.0, "eps": 1e-7},
            "none": {"params": [], "lr": 5e-3, "weight_decay": 0.3},
        }
        for name, parameter in self.named_parameters():
            kind = "embeddings" if "embed" in name else "matrices" if parameter.ndim > 1 else "vectors"
            groups[kind]["params"].append(parameter)
        kinds = list(KINDS)
        if self.order == "shuffled":
            random.Random(self.global_rank).shuffle(kinds)
        optimizer = torch.optim.AdamW([{**groups[kind], "kind": kind} for kind in kinds], lr=1.0)
        if self.schedule == "exponential":
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": ExponentialLR(optimizer, 0.9), "interval": "step"}}
        rules = {kind: _rule(index + 1) for index, kind in enumerate(KINDS)}
        scheduler = LambdaLR(optimizer, [rules[kind] for kind in kinds])
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def _rule(number: int) -> Any:
    return lambda step: min(1.0, (step + 1) / (4 * number)) * 0.98 ** (number * step)


class Groups(pl.Callback):
    """What rank holds: settings by parameter name and by kind of group, when training begins and after every step."""

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []

    def _look(self, trainer: pl.Trainer) -> None:
        names = {trainer.strategy.made.sharding.optimizer_parameter(slot): slot.name for slot in trainer.strategy.made.slots}
        (optimizer,) = trainer.optimizers
        settings = [{key: each for key, each in group.items() if key != "params"} for group in optimizer.param_groups]
        by_name = {
            names[each]: own
            for group, own in zip(optimizer.param_groups, settings, strict=True)
            for each in group["params"]
            if each in names
        }
        counts = {names[each]: float(state["step"]) for each, state in optimizer.state.items() if each in names}
        by_kind = {own["kind"]: own for own in settings}
        self.records.append({"step": trainer.global_step, "by_name": by_name, "by_kind": by_kind, "counts": counts})

    def on_train_batch_start(self, trainer: pl.Trainer, *arguments: Any) -> None:
        if not self.records:
            self._look(trainer)

    def on_train_batch_end(self, trainer: pl.Trainer, *arguments: Any) -> None:
        self._look(trainer)

    def state_dict(self) -> dict[str, Any]:
        return {"records": self.records}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """What was before belongs to the run before."""


def watch(case: Resumed) -> list[pl.Callback]:
    """`Resumed.callbacks`."""
    return [Groups()]


def settings_at(records: list[dict[str, Any]], step: int, by: str = "by_name") -> dict[str, Any]:
    """Those of all ranks after `step` steps; ranks that hold the same must agree."""
    found: dict[str, Any] = {}
    for record in records:
        ((_, kept),) = record["extra"].items()
        own = next(each for each in kept["records"] if each["step"] == step)[by]
        for name, value in own.items():
            assert found.setdefault(name, value) == value, f"ranks differ in {name}"
    return found
