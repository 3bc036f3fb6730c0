"""B40, kind of fault: a position in the data is kept in units that the resumed run does not share, or moved twice.

What was read before and after is the uninterrupted list, in its order, each sample once, whatever the number of data-parallel
ranks, micro-batches and workers; a limit in steps is reached exactly.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.resuming import Resumed, run

CASE = Resumed("", rows=8, batch_size=4, module={"dropout": 0.0}, trainer={"max_epochs": 3, "limit_val_batches": 0})
MOMENTS = {
    "after_the_first": ("batch_end", 0, 0),
    "epoch_read": ("batch_end", 0, 1),
    "between_epochs": ("epoch_end", 0, -1),
    "second_epoch": ("batch_end", 1, 0),
}
WAYS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "single": (1, 1, {}),
    "dp2": (2, 2, {}),
    "dp4": (4, 4, {}),
    "dp2_pp2": (4, 2, {"pipeline_parallel_size": 2, "num_microbatches": 2}),
}


def batches(records: list[dict[str, Any]]) -> list[tuple[int, int, list[int]]]:
    """(epoch, step, the samples of all ranks) of each step."""
    steps = [[event for event in record["events"] if event[0] == "batch"] for record in records]
    return [(step[0][1], step[0][3], sorted({n for event in step for n in event[5]})) for step in zip(*steps, strict=True)]


def run_in(way: str, case: Resumed) -> list[dict[str, Any]]:
    world_size, copies, strategy = WAYS[way]
    return run(replace(case, strategy=strategy, batch_size=case.batch_size // copies), world_size)


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
def test_the_list_goes_on_where_it_stopped(shuffle: bool, workers: int, tmp_path: Path) -> None:
    case = replace(CASE, folder=str(tmp_path), shuffle=shuffle, num_workers=workers, moments=MOMENTS)
    straight = batches(run_in("single", case))
    assert [sorted(straight[2 * epoch][2] + straight[2 * epoch + 1][2]) for epoch in range(3)] == [list(range(8))] * 3
    assert (straight[0][2] == [0, 1, 2, 3]) is not shuffle
    ways = WAYS if workers == 0 and shuffle else ("single", "dp2")
    for moment, done in (("after_the_first", 1), ("epoch_read", 2), ("between_epochs", 2), ("second_epoch", 3)):
        for way in ways if moment != "epoch_read" else ("dp2",):
            again = run_in(way, replace(case, checkpoint=moment, moments={}))
            assert batches(again) == straight[done:], f"{moment} in {way}"


def test_max_steps_is_reached_exactly_after_every_resume(tmp_path: Path) -> None:
    """Stopped twice, in three layouts: five steps in all, none twice."""
    case = replace(CASE, folder=str(tmp_path))
    limited = replace(case, trainer={**CASE.trainer, "max_steps": 5})
    straight = batches(run_in("single", limited))
    assert [step for _, step, _ in straight] == [1, 2, 3, 4, 5]
    found = batches(run_in("dp2", replace(limited, moments={"one": ("batch_end", 0, 0)})))[:1]
    found += batches(run_in("dp2_pp2", replace(limited, checkpoint="one", moments={"two": ("batch_end", 1, 0)})))[:2]
    found += batches(run_in("dp4", replace(limited, checkpoint="two")))
    assert found == straight
    assert batches(run_in("single", replace(limited, checkpoint="two", trainer={**CASE.trainer, "max_steps": 3}))) == []
