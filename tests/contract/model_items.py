"""Point 8: models of a user's own, with a plan and without."""

from __future__ import annotations

from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.contract import own_models
from tests.contract.items import Item
from tests.contract.layouts import LAYOUTS, ContractLayout
from tests.contract.models import LossRecorder, make_trainer

PIPELINED = [name for name, layout in LAYOUTS.items() if layout.pipelined]
CONTEXT = [name for name, layout in LAYOUTS.items() if layout.context_parallel]
TENSOR = [name for name, layout in LAYOUTS.items() if layout.tensor_parallel]


class Fitting(pl.LightningModule):
    """Trains a model on the inputs and targets of the batch."""

    def __init__(self, kind: type[nn.Module], planned: bool) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            self.model = kind()
        if planned:
            self.parallel_plan = lambda: kind.plan

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        *inputs, target = batch
        logits = self.model(*inputs)
        return F.cross_entropy(logits.flatten(0, -2), target.flatten())

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.training_step(batch, batch_idx))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def _rows(images: bool, pair: bool) -> list[Any]:
    generator = torch.Generator().manual_seed(4)
    rows = []
    for _ in range(21):
        ids = torch.randint(0, own_models.VOCAB, (2, own_models.LENGTH), generator=generator)
        picture = torch.randn(3, own_models.PIXELS, own_models.PIXELS, generator=generator)
        target = torch.randint(0, own_models.CLASSES, (), generator=generator)
        rows.append((picture, target) if images else (ids[0], ids[1], ids[1].roll(1)) if pair else (ids[0], ids[0].roll(1)))
    return rows


def _train(kind: type[nn.Module], images: bool, pair: bool, planned: bool, layout: ContractLayout, folder: str) -> Any:
    losses = LossRecorder()
    data = DataLoader(_rows(images, pair), batch_size=layout.batch_size)
    trainer = make_trainer(layout, max_epochs=2, callbacks=[losses], gradient_clip_val=1.0)
    trainer.fit(Fitting(kind, planned), data, data)
    return {"losses": losses.losses, "val": float(trainer.callback_metrics["val"])}


def _item(name: str, kind: type[nn.Module], refused: Any, images: bool = False, pair: bool = False, planned: bool = True) -> Item:
    return Item(name, 8, partial(_train, kind, images, pair, planned), refused=refused)


NO_SEQUENCES = dict.fromkeys(CONTEXT, "context_parallel_size is 2")
NO_RULES = dict.fromkeys(TENSOR, "ParallelPlan(tensor={")
NO_UNITS = {**dict.fromkeys(PIPELINED, "ParallelPlan(units=("), **dict.fromkeys(TENSOR, "ParallelPlan(")}

ITEMS = [
    _item("own_transformer", own_models.Transformer, {}),
    _item("own_convolutions", own_models.ConvNet, {**NO_RULES, **NO_SEQUENCES}, images=True),
    _item("own_mixer", own_models.Mixer, NO_SEQUENCES, images=True),
    _item("own_encoder_decoder", own_models.EncoderDecoder, {}, pair=True),
    _item("transformer_without_plan", own_models.Transformer, NO_UNITS, planned=False),
    _item("convolutions_without_plan", own_models.ConvNet, {**NO_UNITS, **NO_SEQUENCES}, images=True, planned=False),
    _item("mixer_without_plan", own_models.Mixer, {**NO_UNITS, **NO_SEQUENCES}, images=True, planned=False),
    _item("encoder_decoder_without_plan", own_models.EncoderDecoder, NO_UNITS, pair=True, planned=False),
]
