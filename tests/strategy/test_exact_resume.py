"""A run that goes on from a checkpoint does, bit for bit, what the uninterrupted run did after it was written."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.support.resuming import Resumed, assert_same_end, rest_after, run

MOMENTS = {
    "epoch_start": ("epoch_start", 1, -1),
    "batch_start": ("batch_start", 0, 3),
    "after_backward": ("after_backward", 0, 3),
    "before_step": ("before_step", 1, 1),
    "batch_end": ("batch_end", 0, 1),
    "batch_end_before_validation": ("batch_end", 0, 2),
    "within_validation": ("validation_batch_end", 0, 0),
    "validation_end": ("validation_end", 0, 2),
    "last_batch_at_hand": ("at_hand", 0, 5),
    "last_batch_end": ("batch_end", 0, 5),
    "last_validation_end": ("validation_end", 0, 5),
    "epoch_end": ("epoch_end", 0, -1),
    "second_epoch": ("batch_end", 1, 3),
}
SINGLE = Resumed("", trainer={"val_check_interval": 0.5}, moments=MOMENTS)


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> tuple[Resumed, list[dict[str, Any]]]:
    case = replace(SINGLE, folder=str(tmp_path_factory.mktemp("single")))
    return case, run(case)


def check_rest(case: Resumed, whole: list[dict[str, Any]], name: str, world_size: int = 1) -> None:
    again = run(replace(case, checkpoint=name, moments={}), world_size)
    for rank, (wanted, record) in enumerate(zip(rest_after(whole, name), again, strict=True)):
        assert wanted, "nothing was left to do"
        assert record["events"] == wanted, f"rank {rank}"
    assert_same_end(whole, again)
    assert [record["epoch"] for record in again] == [record["epoch"] for record in whole]


@pytest.mark.parametrize("moment", MOMENTS)
def test_at_every_moment(moment: str, single: tuple[Resumed, list[dict[str, Any]]]) -> None:
    check_rest(*single, moment)


VARIANTS: dict[str, tuple[Resumed, tuple[str, ...]]] = {
    "accumulated": (
        replace(SINGLE, trainer={"val_check_interval": 0.5, "accumulate_grad_batches": 2}),
        ("batch_start", "before_step", "batch_end", "batch_end_before_validation", "validation_end", "epoch_end"),
    ),
    "accumulated_to_a_short_window": (
        replace(SINGLE, trainer={"accumulate_grad_batches": 4}),
        ("batch_end", "batch_start", "last_batch_at_hand", "last_batch_end", "last_validation_end", "second_epoch"),
    ),
    "workers": (replace(SINGLE, num_workers=2, draws=True), ("batch_start", "batch_end", "last_validation_end", "epoch_end")),
    "counted_in_steps": (
        replace(SINGLE, trainer={"max_epochs": -1, "max_steps": 10, "val_check_interval": 0.5}),
        ("batch_end", "validation_end", "last_batch_end", "last_validation_end", "epoch_end", "epoch_start"),
    ),
    "validated_every_few_batches": (
        replace(SINGLE, trainer={"val_check_interval": 4, "check_val_every_n_epoch": None}),
        ("batch_end", "batch_start", "last_batch_end", "epoch_end", "second_epoch"),
    ),
    "validated_every_second_epoch": (replace(SINGLE, trainer={"check_val_every_n_epoch": 2}), ("last_batch_end", "epoch_end")),
    "limited": (
        replace(SINGLE, draws=True, trainer={"limit_train_batches": 4, "max_epochs": 3}),
        ("batch_end", "batch_start", "epoch_end", "epoch_start", "second_epoch"),
    ),
    "watching_each_validation": (
        replace(SINGLE, module={"plateau": "step"}, trainer={"val_check_interval": 0.5, "num_sanity_val_steps": 0}),
        ("batch_end_before_validation", "validation_end", "last_validation_end", "epoch_end"),
    ),
    "watching_each_epoch": (
        replace(SINGLE, module={"plateau": "epoch"}, trainer={"max_epochs": 3}),
        ("last_batch_end", "last_validation_end", "epoch_end", "second_epoch"),
    ),
    "scaled_and_clipped": (
        replace(SINGLE, trainer={"precision": "16-mixed", "gradient_clip_val": 0.5, "accumulate_grad_batches": 2}),
        ("batch_start", "second_epoch"),
    ),
    "uneven_last_batch": (replace(SINGLE, rows=22), ("batch_end", "last_batch_end", "epoch_end")),
}
WHOLE: dict[str, tuple[Resumed, list[dict[str, Any]]]] = {}


@pytest.mark.parametrize(("variant", "moment"), [(name, moment) for name, (_, moments) in VARIANTS.items() for moment in moments])
def test_every_kind_of_run(variant: str, moment: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    if variant not in WHOLE:
        case = replace(VARIANTS[variant][0], folder=str(tmp_path_factory.mktemp(variant)))
        WHOLE[variant] = case, run(case)
    check_rest(*WHOLE[variant], moment)
