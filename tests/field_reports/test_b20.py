"""B20, kind of fault: several optimizers under model parallelism are accepted and wrong, or found out late.

Networks that are trained against each other, with a gradient penalty, run as in one process wherever the module may call backward
itself, and are refused at set-up under a pipeline.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.contract.items import Item, compare_item
from tests.contract.layouts import LAYOUTS, ContractLayout
from tests.contract.models import HIDDEN, Module, loader, make_trainer

PIPELINED = ("pp2_1f1b", "dp2_pp2")


class Adversarial(Module):
    """A model, a critic with a gradient penalty that is trained twice as often, and an encoder with an optimizer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(2)
            self.critic = nn.Sequential(nn.Linear(16, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 1))
            self.encoder = nn.Linear(16, 16)
        self.seen: list[Any] = []

    def configure_optimizers(self) -> Any:
        model = torch.optim.SGD(self.model.parameters(), lr=0.3)
        critic = torch.optim.Adam(self.critic.parameters(), lr=0.01)
        encoder = torch.optim.SGD(self.encoder.parameters(), lr=0.1, momentum=0.9)
        return [model, critic, encoder], [torch.optim.lr_scheduler.StepLR(critic, 2, 0.5)]

    def penalty(self, logits: Tensor) -> Tensor:
        logits = logits.detach().requires_grad_()
        (slope,) = torch.autograd.grad(self.critic(logits).sum(), logits, create_graph=True)
        return (slope.norm(dim=-1) - 1.0).square().mean()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        model, critic, encoder = self.optimizers()
        for _ in range(2):
            self.toggle_optimizer(critic)
            judged = self.critic(self.model(batch["ids"])).mean() + self.penalty(self.model(batch["ids"]))
            critic.zero_grad()
            self.manual_backward(judged)
            critic.step()
            self.untoggle_optimizer(critic)
        logits = self.encoder(self.model(batch["ids"]))
        loss = self.loss(batch) - 0.1 * self.critic(logits).mean()
        model.zero_grad()
        encoder.zero_grad()
        self.manual_backward(loss)
        model.step()
        if batch_idx % 2:
            encoder.step()
        self.lr_schedulers().step()
        self.log_dict({"loss": loss, "judged": judged})

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        values = {name: float(value) for name, value in self.trainer.callback_metrics.items()}
        self.seen.append((values, self.optimizers()[1].param_groups[0]["lr"], self.trainer.global_step))


def adversarial(layout: ContractLayout, folder: str) -> Any:
    module = Adversarial()
    options = {} if layout.pipelined else {"num_microbatches": None}
    make_trainer(layout, options, max_epochs=2).fit(module, loader(layout, 21))
    return {"seen": module.seen}


ITEM = Item("b20", 4, adversarial, refused=dict.fromkeys(PIPELINED, "calls backward itself"), relative=1e-5)


@pytest.mark.parametrize("layout", ["dp2", "dp2_zero1", "dp2_zero3", "tp2", *PIPELINED])
def test_three_optimizers(layout: str) -> None:
    result, why = compare_item(ITEM, LAYOUTS[layout])
    assert result == ("refused" if layout in PIPELINED else "same"), "\n".join(why[:10])
