"""B28, kind of fault: values that ranks log under different names, in another order or at different times are mixed up, or hang.

Names are agreed on; a value keeps its own name; a name that one rank alone has is known to all.
"""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from tests.contract.layouts import LAYOUTS
from tests.contract.models import Module, loader, make_trainer, quiet
from tests.support.ranks import run_ranks


class Different(Module):
    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val", self.loss(batch))
        self.log(f"val_of_{'even' if int(batch['row'][0]) % 8 < 4 else 'odd'}_rows", 1.0 + batch_idx, sync_dist=True)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        rank = self.trainer.global_rank
        names = ["a", "b", "c"]
        for name in names if rank == 0 else reversed(names):
            self.log(name, {"a": 1.0, "b": 2.0, "c": 3.0}[name], sync_dist=True)
        self.log("even" if rank == 0 else "odd", 10.0 if rank == 0 else 20.0, sync_dist=True, on_epoch=True)
        if batch_idx == rank + 1:
            self.log("late", float(batch_idx), sync_dist=True, reduce_fx="max")

    def on_train_epoch_end(self) -> None:
        if self.trainer.global_rank == 1:
            self.log("last_rank", 5.0)

    def on_validation_epoch_end(self) -> None:
        self.log("val_even" if self.trainer.global_rank == 0 else "val_odd", 7.0, sync_dist=True)


def _metrics(name: str) -> Any:
    layout = LAYOUTS[name]
    with quiet():
        trainer = make_trainer(layout, max_epochs=2)
        trainer.fit(Different(), loader(layout, 24), loader(layout, 16, seed=2))
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


@pytest.mark.parametrize("layout", ["dp2", "dp2_zero3", "pp2_1f1b", "tp2"])
def test_every_value_keeps_its_name(layout: str) -> None:
    first, second = run_ranks(_metrics, 2, layout, process_group=False, timeout=60)
    assert first == second
    assert {name: first[name] for name in ("a", "b", "c")} == {"a": 1.0, "b": 2.0, "c": 3.0}
    assert (first["even_epoch"], first["odd_epoch"]) == (10.0, 20.0)
    assert (first["val_even"], first["val_odd"], first["last_rank"], first["late"]) == (7.0, 7.0, 5.0, 2.0)
    if layout.startswith("dp2"):
        assert {"val_of_even_rows", "val_of_odd_rows"} <= first.keys()
