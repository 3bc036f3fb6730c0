"""Point 4: parameter groups, schedulers, optimizers of every kind, manual optimization."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LinearLR, OneCycleLR, SequentialLR, StepLR

from tests.contract.items import Item
from tests.contract.layouts import LAYOUTS, ContractLayout
from tests.contract.models import LossRecorder, Module, loader, make_trainer

PIPELINED = [name for name, layout in LAYOUTS.items() if layout.pipelined]
SPLIT = [name for name, layout in LAYOUTS.items() if layout.sharded or layout.tensor_parallel]


class Groups(Module):
    """Groups decided by layer type, by name, by attribute; a stage may have nothing of a group."""

    def configure_optimizers(self) -> Any:
        no_decay, decay = [], []
        for _, layer in self.model.named_modules():
            for name, parameter in layer.named_parameters(recurse=False):
                quiet = name == "bias" or isinstance(layer, nn.LayerNorm)
                if not isinstance(layer, nn.Embedding):
                    (no_decay if quiet else decay).append(parameter)
        groups = [
            {"params": decay, "weight_decay": 0.1, "lr": 0.01},
            {"params": no_decay, "weight_decay": 0.0},
            {"params": [self.model.embed.weight], "lr": 0.002},
        ]
        optimizer = torch.optim.AdamW(groups, lr=0.02)
        scheduler = LambdaLR(optimizer, [lambda s: 1 / (1 + s), lambda s: 1.0, lambda s: min(1.0, (s + 1) / 4)])
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.rates.append([group["lr"] for group in self.optimizers().param_groups])
        self.decays = [group["weight_decay"] for group in self.optimizers().param_groups]


def groups(layout: ContractLayout, folder: str) -> Any:
    module, losses = Groups(), LossRecorder()
    module.rates = []
    make_trainer(layout, max_epochs=2, callbacks=[losses]).fit(module, loader(layout, 21))
    return {"losses": losses.losses, "rates": module.rates, "decays": module.decays}


class Frozen(Module):
    """Only one layer's up-projection and the head's bias are trained: most stages hold nothing for the optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.model.requires_grad_(False)
        self.model.layers[1].mlp["up"].requires_grad_(True)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([each for each in self.parameters() if each.requires_grad], lr=0.1)


def frozen(layout: ContractLayout, folder: str) -> Any:
    losses = LossRecorder()
    make_trainer(layout, max_epochs=2, callbacks=[losses], gradient_clip_val=0.05).fit(Frozen(), loader(layout, 21))
    return {"losses": losses.losses}


def _warm_then_cosine(optimizer: Any) -> Any:
    return SequentialLR(optimizer, [LinearLR(optimizer, 0.1, total_iters=3), CosineAnnealingLR(optimizer, 5)], [3])


SCHEDULES = {
    "one_cycle": lambda optimizer: {"scheduler": OneCycleLR(optimizer, 0.5, total_steps=9), "interval": "step"},
    "warm": lambda optimizer: {"scheduler": _warm_then_cosine(optimizer), "interval": "step"},
    "epochs": lambda optimizer: StepLR(optimizer, 1, 0.5),
    "every_second": lambda optimizer: {"scheduler": StepLR(optimizer, 1, 0.9), "interval": "step", "frequency": 2},
}


class Scheduled(Module):
    kind = ""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.9)
        return {"optimizer": optimizer, "lr_scheduler": SCHEDULES[self.kind](optimizer)}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.rates.append((float(outputs["loss"]), self.optimizers().param_groups[0]["lr"]))


def schedules(layout: ContractLayout, folder: str) -> Any:
    found = {}
    for kind in SCHEDULES:
        module = Scheduled()
        module.kind, module.rates = kind, []
        make_trainer(layout, max_epochs=3, accumulate_grad_batches=2 if kind == "warm" else 1).fit(module, loader(layout, 21))
        found[kind] = module.rates
    return found


class Named(Module):
    """Any torch optimizer, by name."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.make = make

    def configure_optimizers(self) -> Any:
        return self.make(self)


OPTIMIZERS = {
    "sgd_nesterov": lambda m: torch.optim.SGD(m.parameters(), lr=0.3, momentum=0.9, nesterov=True, foreach=True),
    "adam": lambda m: torch.optim.Adam(m.parameters(), lr=0.01, amsgrad=True),
    "adamw_fused": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, fused=True),
    "adamw_loop": lambda m: torch.optim.AdamW(m.named_parameters(), lr=0.01, foreach=False),
    "rmsprop": lambda m: torch.optim.RMSprop(m.parameters(), lr=0.003),
    "adagrad": lambda m: torch.optim.Adagrad(m.parameters(), lr=0.05),
}


def optimizers(layout: ContractLayout, folder: str) -> Any:
    found = {}
    for name, make in OPTIMIZERS.items():
        losses = LossRecorder()
        make_trainer(layout, max_steps=3, callbacks=[losses], gradient_clip_val=1.0).fit(Named(make), loader(layout, 24))
        found[name] = losses.losses
    return found


def _matrices(module: Module) -> Any:
    return torch.optim.Muon([each for each in module.parameters() if each.ndim == 2], lr=0.05)


def muon(layout: ContractLayout, folder: str) -> Any:
    losses = LossRecorder()
    # torch orthogonalises in bfloat16 (2.13), where rounding of a gradient's last bit becomes 4e-3 of a step
    with mock.patch.object(Tensor, "bfloat16", Tensor.double):
        make_trainer(layout, max_steps=3, callbacks=[losses]).fit(Named(_matrices), loader(layout, 24))
    return {"losses": losses.losses}


def adafactor(layout: ContractLayout, folder: str) -> Any:
    losses = LossRecorder()
    make = Named(lambda module: torch.optim.Adafactor(module.parameters(), lr=0.05))
    make_trainer(layout, max_steps=3, callbacks=[losses]).fit(make, loader(layout, 24))
    return {"losses": losses.losses}


def lbfgs(layout: ContractLayout, folder: str) -> Any:
    losses = LossRecorder()
    # its curvature is made of differences of gradients, so that it enlarges rounding
    make = Named(lambda module: torch.optim.LBFGS(module.parameters(), lr=0.1, max_iter=3))
    make_trainer(layout, max_steps=6, callbacks=[losses]).fit(make, loader(layout, 24))
    return {"losses": losses.losses}


class TwoOptimizers(Module):
    """A generator and a discriminator, stepped in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            self.judge = nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 1))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        first, second = self.optimizers()
        self.toggle_optimizer(first)
        loss = self.loss(batch) + self.judge(self.model(batch["ids"])).square().mean()
        first.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(first, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
        first.step()
        self.untoggle_optimizer(first)
        self.toggle_optimizer(second)
        second.zero_grad()
        judged = self.judge(self.model(batch["ids"])).sub(1.0).square().mean()
        self.manual_backward(judged * 0.5)
        self.manual_backward(self.judge(self.model(batch["ids"])).sub(1.0).square().mean() * 0.5)
        second.step()
        self.untoggle_optimizer(second)
        self.log_dict({"loss": loss, "judged": judged}, on_step=True, on_epoch=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.model.parameters(), lr=0.5), torch.optim.Adam(self.judge.parameters(), lr=0.02)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append({name: float(value) for name, value in self.trainer.callback_metrics.items()})


def manual(layout: ContractLayout, folder: str) -> Any:
    module = TwoOptimizers()
    module.seen = []
    make_trainer(layout, {"num_microbatches": None} if not layout.pipelined else {}, max_epochs=2).fit(module, loader(layout, 21))
    return {"seen": module.seen}


ITEMS = [
    Item("parameter_groups", 4, groups),
    Item("frozen_layers", 4, frozen),
    Item("learning_rate_schedules", 4, schedules),
    Item("element_by_element_optimizers", 4, optimizers),
    Item("muon", 4, muon, refused=dict.fromkeys(SPLIT, "Muon")),
    Item("adafactor", 4, adafactor, refused=dict.fromkeys(SPLIT, "Adafactor")),
    Item("closures_of_lbfgs", 4, lbfgs, refused=dict.fromkeys((*SPLIT, *PIPELINED), "LBFGS"), relative=1e-4),
    Item("two_optimizers_by_hand", 4, manual, refused=dict.fromkeys(PIPELINED, "calls backward itself")),
]
