"""`self.log` in a step asks Lightning once a name, not once a micro-batch; what Lightning refuses is refused all the same."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from tests.contract.layouts import LAYOUTS
from tests.contract.models import Module, loader, make_trainer, quiet
from tests.support.ranks import run_ranks


class Logging(Module):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss)
        self.log_dict({"twice": loss * 2, "number": 3}, on_epoch=True)
        self.log("rows", float(len(batch["ids"])), reduce_fx="sum", batch_size=len(batch["ids"]))
        return loss


class WithLog(Logging):
    """Has a `log` of its own, which must see every call."""

    calls = 0

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        type(self).calls += 1
        super().log(f"own/{name}", value, *args, **kwargs)


class Changing(Module):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.log("name", 1.0, on_epoch=bool(batch_idx % 2))
        return self.loss(batch)


class Vector(Module):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.log("name", batch["ids"].float() if batch_idx else 1.0)
        return self.loss(batch)


def _calls(kind: Any) -> Any:
    layout, module, original, calls = LAYOUTS["single"], kind(), pl.LightningModule.log, []

    def log(self: Any, *args: Any, **kwargs: Any) -> None:
        calls.append(args[0])
        original(self, *args, **kwargs)

    with quiet(), patch.object(pl.LightningModule, "log", log):
        trainer = make_trainer(layout, max_steps=3)
        try:
            trainer.fit(module, loader(layout, 24))
        except (MisconfigurationException, ValueError) as error:
            return str(error)
    return calls, {name: float(value) for name, value in trainer.callback_metrics.items()}, getattr(kind, "calls", 0)


def test_lightning_is_asked_once_a_name() -> None:
    calls, metrics, _ = run_ranks(_calls, 1, Logging, process_group=False)[0]
    assert calls == ["loss", "twice", "number", "rows"]
    assert (metrics["number"], metrics["rows"]) == (3.0, 8.0)


def test_a_log_of_the_users_own_sees_every_call() -> None:
    calls, metrics, own = run_ranks(_calls, 1, WithLog, process_group=False)[0]
    assert own == len(calls) == 3 * 2 * 4
    assert "own/loss" in metrics


def test_what_lightning_refuses_is_refused() -> None:
    assert "different arguments" in run_ranks(_calls, 1, Changing, process_group=False)[0]
    assert ".mean())" in run_ranks(_calls, 1, Vector, process_group=False)[0]
