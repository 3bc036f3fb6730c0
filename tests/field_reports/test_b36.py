"""B36, kind of fault: a field is lost on load because nobody asked for it by name.

Every field of every group comes back: those of the optimizer, those the schedule wrote (`initial_lr`), the user's own, and those
of a group that holds no parameter here or anywhere; so the rates that follow are those of the uninterrupted run.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.field_reports.test_b34 import CASE, MOMENTS, SAVED_AT, run_in
from tests.support.grouped import KINDS, settings_at


@pytest.mark.parametrize("schedule", ["lambda", "exponential"])
@pytest.mark.parametrize(("source", "target"), [("single", "single"), ("single", "pp2"), ("pp2", "pp2"), ("pp2", "single")])
def test_every_field_of_every_group(source: str, target: str, schedule: str, tmp_path: Path) -> None:
    case = replace(CASE, folder=str(tmp_path), module={"schedule": schedule})
    straight = run_in(source, replace(case, moments=MOMENTS))
    again = run_in(target, replace(case, checkpoint="saved"))
    for step in range(SAVED_AT, 7):
        found, wanted = settings_at(again, step, "by_kind"), settings_at(straight, step, "by_kind")
        assert set(found) == set(KINDS)
        for kind in KINDS:
            assert found[kind].keys() == wanted[kind].keys()
            assert "initial_lr" in found[kind]
            assert found[kind] == wanted[kind], f"{kind} after step {step}"
