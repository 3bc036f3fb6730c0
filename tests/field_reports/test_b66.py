"""B66, kind of fault: a resumed run needs more memory than the fresh one did.

Loading leaves no copies behind: a resumed run holds, at each moment of a step, what the fresh one held there from its second step
on; before that the fresh one holds less, since the optimizer has no states yet.
"""

from __future__ import annotations

import gc
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from tests.contract.layouts import LAYOUTS
from tests.contract.models import Module, loader, make_trainer, quiet
from tests.support.ranks import run_ranks

TOLERANCE = 0.05


def held_bytes() -> int:
    """Memory of all live tensors, each storage once."""
    gc.collect()
    storages = {}
    for each in gc.get_objects():
        if isinstance(each, Tensor) and not each.is_meta:
            storage = each.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


class Wide(Module):
    """Weights that dwarf everything else."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            for layer in self.model.layers:
                layer.mlp["up"], layer.mlp["down"] = torch.nn.Linear(8, 4000), torch.nn.Linear(4000, 8)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Phases(pl.Callback):
    """Bytes at the moments of each step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, int]] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self.steps.append({"start": held_bytes()})

    def on_before_optimizer_step(self, *_: Any) -> None:
        self.steps[-1]["before step"] = held_bytes()

    def on_train_batch_end(self, *_: Any) -> None:
        self.steps[-1]["end"] = held_bytes()


def _phases(name: str, folder: str, resumed: bool) -> list[dict[str, int]]:
    layout, phases = LAYOUTS[name], Phases()
    with quiet():
        trainer = make_trainer(layout, max_steps=6 if resumed else 3, callbacks=[phases])
        trainer.fit(Wide(), loader(layout, 48), ckpt_path=f"{folder}/three.ckpt" if resumed else None)
        if not resumed:
            trainer.save_checkpoint(f"{folder}/three.ckpt")
    return phases.steps


@pytest.mark.parametrize("layout", ["single", "dp2_zero1", "dp2_zero3", "pp2_1f1b"])
def test_a_resumed_run_holds_what_the_fresh_one_did(layout: str, tmp_path: Any) -> None:
    world_size = LAYOUTS[layout].world_size
    fresh = run_ranks(_phases, world_size, layout, str(tmp_path), False, process_group=False)
    resumed = run_ranks(_phases, world_size, layout, str(tmp_path), True, process_group=False)
    for before, after in zip(fresh, resumed, strict=True):
        assert before[0]["start"] < before[1]["start"], "the case: Adam's states come with the first step"
        for phase, number in before[2].items():
            for step in after:
                assert step[phase] <= number * (1 + TOLERANCE), (phase, before, after)
