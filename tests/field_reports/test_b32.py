"""B32, kind of fault: the loss of an evaluation is a mean of means, where parts have different numbers of valid tokens.

A step that says how many tokens its loss is the mean of gets the mean over all tokens of all micro-batches and ranks, under every
schedule; what a step does not return is not kept.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hybrid_strategy.registry import parts
from tests.contract.items import Item, compare_item
from tests.contract.layouts import ContractLayout
from tests.contract.models import LENGTH, Module, loader, make_trainer, row_losses

SCHEDULES = sorted(name for name in parts("schedules"))


class Masked(Module):
    """Most rows have few valid tokens, some have all."""

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Any]:
        labels = batch["labels"].clone()
        labels[batch["row"] % 3 != 0, : LENGTH - 1] = -100
        tokens = (labels != -100).sum()
        loss = row_losses(self.model(batch["ids"]), labels).sum() * LENGTH / tokens
        self.log("val", loss, batch_size=int(tokens))
        return {"loss": loss, "num_tokens": tokens}

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert all(value.numel() == 1 for value in outputs.values() if isinstance(value, torch.Tensor))


def validate(layout: ContractLayout, folder: str) -> Any:
    trainer = make_trainer(layout)
    return {"val": [trainer.validate(Masked(), loader(layout, size), verbose=False) for size in (32, 21, 5)]}


def _layout(schedule: str, data_parallel_size: int) -> ContractLayout:
    strategy = {"pipeline_parallel_size": 2, "num_microbatches": 4, "schedule": schedule}
    return ContractLayout(f"{schedule}_{data_parallel_size}", 2 * data_parallel_size, data_parallel_size, strategy)


@pytest.mark.parametrize(("schedule", "size"), [(name, 1) for name in SCHEDULES] + [("Interleaved1F1B", 2), ("1F1B", 2)])
def test_the_loss_is_that_of_all_tokens(schedule: str, size: int) -> None:
    result, why = compare_item(Item("b32", 6, validate), _layout(schedule, size))
    assert result == "same", "\n".join(why[:10])
