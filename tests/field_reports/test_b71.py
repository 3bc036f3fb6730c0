"""B71, kind of fault: counters and the schedule of the learning rate go on where a loss scaler left the optimizer step out.

The schedule, and Adam's own count, follow real steps; each skipped step is logged.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision

from tests.contract.layouts import LAYOUTS
from tests.contract.logging_items import Memory
from tests.contract.models import Module, loader, make_trainer, quiet
from tests.support.ranks import run_ranks


class Warm(Module):
    """The rate of real step n is n + 1 thousandths."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-3)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step + 1.0)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        optimizer = self.trainer.optimizers[0]
        steps = {float(state["step"]) for state in optimizer.state.values()} or {0.0}
        scale = self.trainer.precision_plugin.scaler.get_scale()
        self.seen.append((max(steps), round(1e3 * optimizer.param_groups[0]["lr"], 6), scale))


def _run(name: str) -> Any:
    layout, memory = LAYOUTS[name], Memory()
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**22, growth_interval=100))
    module = Warm()
    with quiet():
        trainer = make_trainer(layout, max_steps=8, plugins=[plugin], logger=memory)
        trainer.fit(module, loader(layout, 64))
    logged = [(step, values["skipped_steps"]) for step, values in memory.lines if "skipped_steps" in values]
    return module.seen, logged


@pytest.mark.parametrize("layout", ["single", "dp2", "dp2_zero3", "pp2_1f1b"])
def test_the_schedule_follows_real_steps(layout: str) -> None:
    ranks = run_ranks(_run, LAYOUTS[layout].world_size, layout, process_group=False, timeout=60)
    for seen, logged in ranks:
        skipped = [index for index, (_, _, scale) in enumerate(seen) if scale < (2.0**22 if index == 0 else seen[index - 1][2])]
        assert 2 <= len(skipped) < 7, "the case: the first steps overflow, later ones do not"
        for index, (adam, rate, _) in enumerate(seen):
            real = index + 1 - sum(each <= index for each in skipped)
            assert (adam, rate) == (real, real + 1.0)
        assert [count for _, count in logged] == [float(each + 1) for each in range(len(skipped))]
        assert seen == ranks[0][0]
