"""B68, kind of fault: replicas write the same weights twice, or one rank writes all; replicas sum gradients every micro-batch."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest

from tests.strategy.test_traffic import FLOAT, ROWS, WIDE, count_here
from tests.support.ranks import run_ranks
from tests.support.training import Case, train_here

LAYOUTS: dict[str, dict[str, Any]] = {
    "dp4": {},
    "dp2x2_zero2": {"sharding": "zero2", "data_parallel_replicate_size": 2},
    "dp2x2_zero3": {"sharding": "zero3", "data_parallel_replicate_size": 2},
    "dp2_tp2": {"tensor_parallel_size": 2},
    "cp2_dp2": {"context_parallel_size": 2},
}
WINDOW = 4


class _Saving(pl.Callback):
    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        trainer.save_checkpoint(self.path)


def _save(strategy: dict[str, Any], path: str) -> None:
    train_here(Case(strategy=strategy, shape=WIDE, steps=1, trainer={"callbacks": [_Saving(path)]}))


@pytest.mark.parametrize("name", LAYOUTS)
def test_one_copy_is_written_and_all_write_alike(name: str, tmp_path: Path) -> None:
    run_ranks(_save, 4, LAYOUTS[name], str(tmp_path / "one.ckpt"), process_group=False)
    sizes = [path.stat().st_size for path in (tmp_path / "one.ckpt").glob("*.distcp")]
    state = 3 * FLOAT * WIDE.num_parameters  # weights and two moments
    assert state < sum(sizes) < 1.5 * state  # each block has a head of its own, which counts in a model this small
    assert len(sizes) == 4
    assert max(sizes) < 1.5 * sum(sizes) / 4


@pytest.mark.parametrize("sharding", ["zero2", "zero1"])
def test_replicas_sum_once_an_optimizer_step(sharding: str) -> None:
    strategy = {"sharding": sharding, "data_parallel_replicate_size": 2}
    case = Case(strategy=strategy, shape=WIDE, batch_size=ROWS, rows=2 * 4 * ROWS * WINDOW, steps=2)
    case = dataclasses.replace(case, trainer={"accumulate_grad_batches": WINDOW})
    for steps in run_ranks(count_here, 4, case, process_group=False):
        quiet = [calls for calls, _, _ in steps if "all_reduce" not in calls]
        assert quiet == 2 * [{"all_gather_single": 1}, {}, {}]  # the weights, where they are first needed
        for calls, num_bytes, _ in (steps[WINDOW - 1], steps[-1]):
            assert calls == {"reduce_scatter_single": 1, "all_reduce": 1}
            assert num_bytes["reduce_scatter_single"] == pytest.approx(FLOAT * WIDE.num_parameters, rel=0.01)
            assert num_bytes["all_reduce"] == pytest.approx(FLOAT * WIDE.num_parameters / 2, rel=0.01)
