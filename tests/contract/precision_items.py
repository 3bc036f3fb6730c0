"""Point 7: the numbers of a precision are those of one process in the same precision, within what rounding in it leaves."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor

from hybrid_strategy.parallel import compiled
from tests.contract.items import Item
from tests.contract.layouts import LAYOUTS, ContractLayout
from tests.contract.models import LossRecorder, Module, loader, make_trainer, row_losses

UNCOMPILED = [name for name, layout in LAYOUTS.items() if layout.context_parallel or name == "pp2_zbv"]

BFLOAT16_ROUNDING, FLOAT16_ROUNDING = 2.0**-8, 2.0**-11
"""Half the distance of neighbouring numbers, relative; what one rounding of an activation changes at most.

Cutting a batch changes no row's arithmetic; splitting a layer over tensor-parallel ranks rounds its partial sums once more. The
loss is a mean of rows in float32, so that it moves by less than one rounding a step; the updates before it add theirs, and all
of them together stay within a few. Bounds are twice the rounding for losses of five steps.
"""


def _losses(layout: ContractLayout, **options: Any) -> Any:
    losses = LossRecorder()
    make_trainer(layout, max_steps=5, callbacks=[losses], gradient_clip_val=0.5, **options).fit(Module(), loader(layout, 40))
    return losses.losses


def bfloat16_mixed(layout: ContractLayout, folder: str) -> Any:
    return {"losses": _losses(layout, precision="bf16-mixed")}


def bfloat16_true(layout: ContractLayout, folder: str) -> Any:
    return {"losses": _losses(layout, precision="bf16-true")}


def _half(init_scale: float) -> MixedPrecision:
    """Lightning itself does not offer float16 on CPUs."""
    return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=init_scale, growth_interval=3))


def float16_mixed(layout: ContractLayout, folder: str) -> Any:
    return {"losses": _losses(layout, plugins=[_half(1024.0)])}


def compiled_layers(layout: ContractLayout, folder: str) -> Any:
    """Short of generating code, which takes long and is the same for every layout: `tests/strategy/test_compile.py` does."""
    compiled.BACKEND = "aot_eager"
    losses, data = LossRecorder(), loader(layout, 21)
    trainer = make_trainer(layout, {"compile": True}, max_epochs=2, callbacks=[losses], gradient_clip_val=0.5)
    trainer.fit(Evaluated(), data, data)
    return {"losses": losses.losses, "val": float(trainer.callback_metrics["val"])}


class Evaluated(Module):
    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val", self.loss(batch))


class Overflowing(Module):
    """One row of the third batch has a loss that float16 cannot hold the gradient of."""

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        losses = row_losses(self.model(batch["ids"]), batch["labels"])
        return (losses * (1.0 + 1e6 * (batch["row"] == 17))).mean()


class Scales(pl.Callback):
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, *_: Any) -> None:
        optimizer = trainer.optimizers[0]
        steps = {float(state["step"]) for state in optimizer.state.values() if "step" in state}
        self.seen.append((float(outputs["loss"]), trainer.precision_plugin.scaler.get_scale(), max(steps, default=0.0)))


class WithAdam(Overflowing):
    fused = False

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01, fused=self.fused)


def overflow(layout: ContractLayout, folder: str) -> Any:
    """A step with an overflow on one rank, in one micro-batch: skipped by all, once."""
    found = {}
    for name, fused in (("unscaled", False), ("fused", True)):
        scales, module = Scales(), WithAdam()
        module.fused = fused
        make_trainer(layout, max_steps=6, callbacks=[scales], plugins=[_half(256.0)]).fit(module, loader(layout, 48))
        found[name] = scales.seen
    return found


class Dropping(Module):
    def __init__(self) -> None:
        super().__init__()
        self.drop = torch.nn.Dropout(0.2)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        logits = self.drop(self.model(batch["ids"]))
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)


def deterministic(layout: ContractLayout, folder: str) -> Any:
    """The same run twice, with dropout: the same bits."""
    runs = []
    for _ in range(2):
        pl.seed_everything(5, verbose=False)
        losses, module = LossRecorder(), Dropping()
        make_trainer(layout, max_epochs=2, deterministic=True, callbacks=[losses]).fit(module, loader(layout, 21, shuffle=True))
        runs.append((losses.losses, [each.detach().clone() for each in module.parameters()]))
    torch.use_deterministic_algorithms(False)
    same = all(torch.equal(left, right) for left, right in zip(runs[0][1], runs[1][1], strict=True))
    return {"losses": runs[0][0] == runs[1][0], "weights": same}


ITEMS = [
    Item("bfloat16_mixed", 7, bfloat16_mixed, relative=2 * BFLOAT16_ROUNDING),
    Item("bfloat16_true", 7, bfloat16_true, relative=2 * BFLOAT16_ROUNDING),
    Item("float16_mixed", 7, float16_mixed, relative=2 * FLOAT16_ROUNDING),
    Item("overflow_of_float16", 7, overflow, relative=2 * FLOAT16_ROUNDING),
    Item("deterministic", 7, deterministic),
    Item("compiled_layers", 7, compiled_layers, refused=dict.fromkeys(UNCOMPILED, "compile is True")),
]
