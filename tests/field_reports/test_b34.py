"""B34, kind of fault: what ranks hold each of their own is saved under one key, and the last writer wins.

Per-parameter settings, step counts and schedules of every group come back in any layout, also where a stage holds other groups.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.grouped import GroupedLM, settings_at, watch
from tests.support.resuming import Resumed, run

PIPELINE = {"pipeline_parallel_size": 2, "num_microbatches": 2}
LAYOUTS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "single": (1, 1, {}),
    "pp2": (2, 1, PIPELINE),
    "pp2_interleaved": (2, 1, {**PIPELINE, "schedule": "Interleaved1F1B"}),
    "dp2_zero3": (2, 2, {"sharding": "zero3"}),
    "tp2": (2, 1, {"tensor_parallel_size": 2}),
}
CASE = Resumed("", module_class=GroupedLM, callbacks=watch, trainer={"enable_checkpointing": False, "max_steps": 6})
MOMENTS = {"saved": ("batch_end", 0, 2)}
SAVED_AT = 3


def run_in(layout: str, case: Resumed) -> list[dict[str, Any]]:
    world_size, copies, strategy = LAYOUTS[layout]
    return run(replace(case, strategy=strategy, batch_size=case.batch_size // copies), world_size)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """One uninterrupted run that saves, and a folder for each layout."""
    found = {}
    for layout in LAYOUTS:
        case = replace(CASE, folder=str(tmp_path_factory.mktemp(layout)), moments=MOMENTS)
        found[layout] = run_in(layout, case)
        found[f"{layout} folder"] = case.folder
    return found


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("pp2", "single"),
        ("single", "pp2"),
        ("pp2", "pp2"),
        ("pp2_interleaved", "tp2"),
        ("dp2_zero3", "pp2"),
        ("tp2", "dp2_zero3"),
    ],
)
def test_every_parameter_keeps_its_groups_settings(source: str, target: str, whole: dict[str, Any]) -> None:
    case = replace(CASE, folder=whole[f"{source} folder"], checkpoint="saved")
    again = run_in(target, case)
    for step in range(SAVED_AT, 7):
        assert settings_at(again, step) == settings_at(whole["single"], step), step
    counts = settings_at(again, SAVED_AT, "counts")
    assert counts
    assert set(counts.values()) == {float(SAVED_AT)}
    losses = [event[6] for event in again[0]["events"] if event[0] == "batch"]
    wanted = [event[6] for event in whole["single"][0]["events"] if event[0] == "batch"][SAVED_AT:]
    assert losses == pytest.approx(wanted, rel=1e-6)


def test_the_last_writer_of_a_layout_does_not_win(whole: dict[str, Any], tmp_path: Path) -> None:
    """Three layouts one after another: what the first knew is there in the last."""
    case = replace(CASE, folder=whole["single folder"], checkpoint="saved", moments={"second": ("batch_end", 0, 4)})
    run_in("pp2", case)
    again = run_in("dp2_zero3", replace(case, checkpoint="second", moments={}))
    assert settings_at(again, 6) == settings_at(whole["single"], 6)
