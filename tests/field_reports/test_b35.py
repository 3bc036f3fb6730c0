"""B35, kind of fault: something is matched by its place in an order that the ranks, or the runs, do not share.

Groups that come in another order on every rank and in every run keep their settings, rates and schedules by parameter name.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.field_reports.test_b34 import CASE, LAYOUTS, MOMENTS, SAVED_AT, run_in
from tests.support.grouped import settings_at


@pytest.mark.parametrize(("source", "target"), [("pp2", "pp2"), ("pp2", "single"), ("dp2_zero3", "pp2")])
@pytest.mark.parametrize("orders", [("shuffled", "shuffled"), ("same", "shuffled"), ("shuffled", "same")])
def test_groups_in_any_order(source: str, target: str, orders: tuple[str, str], tmp_path: Path) -> None:
    first, second = ({"order": order} for order in orders)
    straight = run_in("single", replace(CASE, folder=str(tmp_path)))
    saving = run_in(source, replace(CASE, folder=str(tmp_path), moments=MOMENTS, module=first))
    assert settings_at(saving, 6) == settings_at(straight, 6)
    again = run_in(target, replace(CASE, folder=str(tmp_path), checkpoint="saved", module=second))
    for step in range(SAVED_AT, 7):
        assert settings_at(again, step) == settings_at(straight, step), step
    assert _losses(again) == pytest.approx(_losses(straight)[SAVED_AT:], rel=1e-6)


def _losses(records: list[dict[str, Any]]) -> list[float]:
    return [event[6] for event in records[0]["events"] if event[0] == "batch"]


def test_orders_do_differ_between_ranks() -> None:
    """What the tests above stand on."""
    import random

    orders = []
    for rank in range(LAYOUTS["pp2"][0]):
        kinds = list(range(4))
        random.Random(rank).shuffle(kinds)
        orders.append(kinds)
    assert orders[0] != orders[1]
