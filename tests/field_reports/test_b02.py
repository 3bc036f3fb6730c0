"""B02, kind of fault: gradients of an accumulation window are divided by a count that is not the window's.

However a window's rows are cut - into batches, micro-batches, data-parallel ranks - its gradient is that of all its rows at once,
reduced once. An epoch whose last window is short keeps Lightning's meaning of it, as one process has it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from torch.utils.data import DataLoader

from tests.support.gate import gate
from tests.support.training import SHAPE, TinyLM, Tokens

PIPELINE = {"pipeline_parallel_size": 2, "num_microbatches": 4}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "pp2": (2, PIPELINE),
    "pp2_zero_bubble": (2, {**PIPELINE, "schedule": "ZBVZeroBubble"}),
    "dp2_zero2": (2, {"sharding": "zero2", "num_microbatches": 2}),
    "dp2_pp2": (4, PIPELINE),
    "dp2_pp2_zero3": (4, {**PIPELINE, "sharding": "zero3"}),
}


def _data(rows: int) -> DataLoader[Any]:
    return DataLoader(Tokens(rows), batch_size=4, shuffle=True)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("window", [2, 3])
def test_a_window_has_the_gradient_of_one_process(name: str, window: int) -> None:
    devices, strategy = LAYOUTS[name]
    trainer = {"accumulate_grad_batches": window}
    report = gate(partial(TinyLM, SHAPE, "sgd"), _data(64), strategy, devices=devices, trainer=trainer)
    assert report.same, str(report)


@pytest.mark.parametrize("name", ["pp2", "dp2_pp2", "dp2_pp2_zero3"])
def test_the_last_window_of_an_epoch_may_be_short(name: str) -> None:
    devices, strategy = LAYOUTS[name]
    rows = 40 if name.startswith("dp2") else 20  # five batches a data-parallel rank: a window of three and one of two
    trainer = {"accumulate_grad_batches": 3}
    report = gate(partial(TinyLM, SHAPE, "sgd"), _data(rows), strategy, devices=devices, trainer=trainer, steps=4)
    assert report.same, str(report)


class ZeroesSeldom(TinyLM):
    """Accumulates by itself: zeroes its gradients at every third step only, and divides nothing."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        if batch_idx % 3 == 0:
            optimizer.zero_grad()


ZEROED: dict[str, tuple[int, dict[str, Any]]] = {
    "dp2": (2, {}),
    "tp2_sequence": (2, {"tensor_parallel_size": 2, "sequence_parallel": True}),
    "dp2_zero1": (2, {"sharding": "zero1"}),
    "dp4_zero3_replicas": (4, {"sharding": "zero3", "data_parallel_replicate_size": 2}),
    "dp2_pp2": (4, PIPELINE),
}


@pytest.mark.parametrize("name", ZEROED)
def test_gradients_that_the_user_does_not_zero_are_counted_once(name: str) -> None:
    devices, strategy = ZEROED[name]
    report = gate(partial(ZeroesSeldom, SHAPE, "sgd"), _data(96), strategy, devices=devices, steps=5)
    assert report.same, str(report)
