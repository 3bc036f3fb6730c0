"""Resuming in several processes, in another layout, with another batch size: every sample once, the same numbers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.resuming import Event, Resumed, assert_same_end, rest_after, run

PIPELINE = {"pipeline_parallel_size": 2, "num_microbatches": 2}
MOMENTS = {
    "batch_end": ("batch_end", 0, 1),
    "batch_start": ("batch_start", 1, 2),
    "last_batch_end": ("batch_end", 0, 5),
    "validation_end": ("validation_end", 0, 5),
    "epoch_end": ("epoch_end", 0, -1),
}
CASE = Resumed("", moments=MOMENTS, module={"dropout": 0.0})

LAYOUTS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "single": (1, 1, {}),
    "dp2_zero1": (2, 2, {"sharding": "zero1"}),
    "dp2_zero3": (2, 2, {"sharding": "zero3"}),
    "tp2_sequence_parallel": (2, 1, {"tensor_parallel_size": 2, "sequence_parallel": True}),
    "pp2_interleaved": (2, 1, {**PIPELINE, "schedule": "Interleaved1F1B"}),
    "dp2_pp2": (4, 2, {**PIPELINE, "sharding": "zero1"}),
}


def in_layout(case: Resumed, name: str) -> tuple[Resumed, int]:
    world_size, data_parallel_size, strategy = LAYOUTS[name]
    return replace(case, strategy=strategy, batch_size=case.batch_size // data_parallel_size), world_size


def batches(records: list[dict[str, Any]]) -> list[tuple[int, int, list[int], float, list[float]]]:
    """(epoch, batch, the samples of all ranks, loss, rates) of each step."""
    steps = [[event for event in record["events"] if event[0] == "batch"] for record in records]
    return [(*step[0][1:3], sorted({n for event in step for n in event[5]}), *step[0][6:8]) for step in zip(*steps, strict=True)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Resumed, list[dict[str, Any]]]:
    case = replace(CASE, folder=str(tmp_path_factory.mktemp("whole")))
    return case, run(case)


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "single"])
def test_same_layout_is_bit_equal_with_dropout(layout: str, tmp_path: Path) -> None:
    case, world_size = in_layout(replace(CASE, folder=str(tmp_path), module={"dropout": 0.2}), layout)
    straight = run(case, world_size)
    for moment in ("batch_start", "last_batch_end"):
        again = run(replace(case, checkpoint=moment, moments={}), world_size)
        assert [record["events"] for record in again] == rest_after(straight, moment)
        assert_same_end(straight, again)


MET = [
    (moment, layout)
    for layout in LAYOUTS
    for moment in MOMENTS
    if layout in ("dp2_pp2", "dp2_zero3") or (layout != "single" and moment in ("batch_end", "epoch_end"))
]
"""What is met where: a tensor or a pipeline split changes nothing of the place in the data."""


@pytest.mark.parametrize(("moment", "layout"), MET)
def test_another_layout_does_the_same_steps(moment: str, layout: str, whole: tuple[Resumed, list[dict[str, Any]]]) -> None:
    case, straight = whole
    other, world_size = in_layout(replace(case, checkpoint=moment, moments={}), layout)
    wanted = batches([{"events": rest_after(straight, moment)[0]}])
    found = batches(run(other, world_size))
    assert [step[:3] for step in found] == [step[:3] for step in wanted]
    assert [step[3] for step in found] == pytest.approx([step[3] for step in wanted], rel=1e-6)
    assert [step[4] for step in found] == [pytest.approx(step[4], rel=1e-12) for step in wanted]


@pytest.mark.parametrize(
    ("layout", "batch_size", "accumulate"), [("single", 3, 1), ("dp2_zero1", 8, 1), ("single", 2, 2), ("dp2_zero1", 5, 2)]
)
@pytest.mark.parametrize("moment", ["batch_end", "batch_start", "epoch_end"])
def test_another_batch_size_reads_what_is_left(
    moment: str, layout: str, batch_size: int, accumulate: int, whole: tuple[Resumed, list[dict[str, Any]]]
) -> None:
    case, straight = whole
    limits = {"accumulate_grad_batches": accumulate}
    other, world_size = in_layout(replace(case, checkpoint=moment, moments={}, batch_size=batch_size, trainer=limits), layout)
    assert samples(batches(run(other, world_size))) == samples(batches([{"events": rest_after(straight, moment)[0]}]))


def samples(steps: list[tuple[int, int, list[int], float, list[float]]]) -> dict[int, list[int]]:
    """By epoch, in order of their numbers; one that comes twice is there twice."""
    epochs = sorted({step[0] for step in steps})
    return {epoch: sorted(n for step in steps if step[0] == epoch for n in step[2]) for epoch in epochs}


@pytest.mark.parametrize("layout", ["single", "dp2_zero1"])
@pytest.mark.parametrize("steps", [4, 6])
def test_a_run_stopped_by_max_steps_goes_on_in_its_epoch(steps: int, layout: str, tmp_path: Path) -> None:
    case, world_size = in_layout(replace(CASE, folder=str(tmp_path), module={"dropout": 0.2}, moments={}), layout)
    straight = run(case, world_size)
    run(replace(case, trainer={"max_steps": steps}, moments={"end": ("train_end", -1, -1)}), world_size)
    again = run(replace(case, checkpoint="end"), world_size)
    for whole, rest in zip(straight, again, strict=True):
        assert rest["events"] == _after_step(whole["events"], steps)
        assert rest["epoch"] == whole["epoch"] == 2
    assert_same_end(straight, again)


def _after_step(events: list[Event], step: int) -> list[Event]:
    """What follows the step; the stopped run has done the end of an epoch that it had finished."""
    at = next(index for index, event in enumerate(events) if event[0] == "batch" and event[3] == step)
    rest = events[at + 1 :]
    return rest if events[at][2] != 5 else rest[rest.index(("epoch_end", 0)) + 1 :]
