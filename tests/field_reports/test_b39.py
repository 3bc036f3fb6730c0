"""B39, kind of fault: the state depends on the moment within a step at which it is taken.

Saved at any point, with gradients held, a checkpoint has all states there are, and the run that goes on from it does what the
uninterrupted one did: a window of accumulated gradients that was not finished is done again.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hybrid_strategy.checkpoint.loading import saved_names
from tests.support.resuming import Resumed, assert_same_end, rest_after, run

MOMENTS = {
    "before_the_first_step": ("after_backward", 0, 0),
    "window_open": ("after_backward", 0, 2),
    "between_its_batches": ("batch_end", 0, 2),
    "gradients_complete": ("before_step", 0, 3),
    "step_done": ("batch_end", 0, 3),
    "next_begun": ("batch_start", 0, 4),
}
STEPS_DONE = {"before_the_first_step": 0, "window_open": 1, "between_its_batches": 1, "gradients_complete": 1}
CASE = Resumed("", trainer={"accumulate_grad_batches": 2, "max_epochs": 1}, moments=MOMENTS)
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp2_zero2": (2, {"sharding": "zero2"}),
    "pp2": (1, {"pipeline_parallel_size": 2, "num_microbatches": 2}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_saved_at_each_point_of_a_step(layout: str, tmp_path: Path) -> None:
    copies, strategy = LAYOUTS[layout]
    case = replace(CASE, folder=str(tmp_path), strategy=strategy, batch_size=4 // copies)
    straight = run(case, 2)
    parameters = {key for key in saved_names(tmp_path / "step_done") if key.startswith("model.")}
    for moment in MOMENTS:
        names = saved_names(tmp_path / moment)
        moments = {key for key in names if key.endswith((".exp_avg", ".exp_avg_sq"))}
        assert len(moments) == (2 * len(parameters) if STEPS_DONE.get(moment, 2) else 0), moment
        again = run(replace(case, checkpoint=moment, moments={}), 2)
        assert [record["events"] for record in again] == rest_after(straight, moment), moment
        assert_same_end(straight, again)


@pytest.mark.parametrize("moment", ["window_open", "gradients_complete", "step_done"])
def test_in_another_layout(moment: str, tmp_path: Path) -> None:
    case = replace(CASE, folder=str(tmp_path), module={"dropout": 0.0})
    straight = run(case)
    again = run(replace(case, strategy=LAYOUTS["pp2"][1], checkpoint=moment, moments={}), 2)
    wanted = [event for event in rest_after(straight, moment)[0] if event[0] == "batch"]
    found = [event for event in again[0]["events"] if event[0] == "batch"]
    assert [event[1:6] for event in found] == [event[1:6] for event in wanted]
    assert [event[6] for event in found] == pytest.approx([event[6] for event in wanted], rel=1e-6)
