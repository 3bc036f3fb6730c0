from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_strategy.planning.cuts import cut_by, moves, played_seconds, stage_costs
from hybrid_strategy.planning.layouts import find_schedule

NAMES = ["embed_tokens", *(f"layers.{index}" for index in range(6)), "norm", "lm_head"]
TABLE = find_schedule("1F1B").build(2, 1, 8)


def test_the_measured_cut_is_the_best_for_what_was_measured() -> None:
    seconds = [0.1, 1, 1, 1, 1, 1, 1, 0.1, 3]
    uniform, counted, measured = cut_by(NAMES, [1, 1, 1, 1, 1, 1, 1, 0, 1], seconds, TABLE)
    assert measured.step_seconds < uniform.step_seconds
    assert measured.step_seconds <= counted.step_seconds
    assert moves(NAMES, uniform.stage_cuts, measured.stage_cuts) == ["layers.3 moves from stage 1 to 0"]


@given(st.lists(st.floats(0.1, 5.0), min_size=9, max_size=9))
@settings(max_examples=30, deadline=None)
def test_a_step_is_at_least_its_slowest_stage(seconds: list[float]) -> None:
    measured = cut_by(NAMES, seconds, seconds, TABLE)[2]
    slowest = max(stage_costs(seconds, measured.stage_cuts))
    assert sum(stage_costs(seconds, measured.stage_cuts)) == pytest.approx(sum(seconds))
    assert measured.step_seconds >= 8 * slowest * 0.999
    assert played_seconds(TABLE, seconds, measured.stage_cuts) == measured.step_seconds
