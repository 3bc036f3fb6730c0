"""B49, kind of fault: a product of values is run as it stands, with many points that can only fail.

Before anything is started the valid points are known, each refused one has its reason, takes no slot and stands in the results.
"""

from __future__ import annotations

import io
import itertools
import json
from pathlib import Path

import pytest
from rich.console import Console

from hybrid_strategy.cli.arguments import Arguments
from hybrid_strategy.cli.multirun import run_sweep
from hybrid_strategy.config.compose import Source
from hybrid_strategy.sweeping import launchers
from hybrid_strategy.sweeping.points import Point
from hybrid_strategy.sweeping.session import Session

SIZES, MICROBATCHES = (1, 2, 4), (1, 4)
LAYERS, HEADS, KV_HEADS, WORLD, BATCH = 6, 4, 2, 4, 16


class Started:
    """A runner that notes what it is asked to run."""

    def __init__(self) -> None:
        self.points: list[Point] = []

    def run(self, points: list[Point], tick: object) -> None:
        self.points += points

    def alive(self, point: Point) -> bool:
        return False


def valid(tensor: int, pipeline: int, micro_batches: int) -> bool:
    """What the grid below can honour, said independently of the planner."""
    whole = WORLD % (tensor * pipeline) == 0
    divides = HEADS % tensor == 0 and KV_HEADS % tensor == 0
    rows = whole and BATCH % (WORLD // (tensor * pipeline) * micro_batches) == 0
    return whole and divides and rows and pipeline <= LAYERS


def test_a_grid_runs_its_valid_points_and_says_why_not_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    started = Started()
    monkeypatch.setitem(launchers.RUNNERS, "local", lambda *_: started)
    sessions: list[Session] = []

    def session(_: Console, *arguments: object) -> Session:
        sessions.append(Session(Console(file=io.StringIO(), width=200), *arguments))  # type: ignore[arg-type]
        return sessions[-1]

    monkeypatch.setattr("hybrid_strategy.cli.multirun.Session", session)
    grid = {"tensor_parallel_size": SIZES, "pipeline_parallel_size": SIZES, "num_microbatches": MICROBATCHES}
    sweep = [f"strategy.{key}={','.join(map(str, values))}" for key, values in grid.items()]
    model = [f"model.num_layers={LAYERS}", f"model.num_attention_heads={HEADS}", f"model.num_key_value_heads={KV_HEADS}"]
    fixed = ["model=llama_tiny", "trainer=cpu", f"cluster.devices={WORLD}", f"data.global_batch_size={BATCH}", "name=s"]
    run_sweep(Arguments(Source((*fixed, *model, *sweep)), None, True, ()), lambda config, folder: None, "x:y")
    every = set(itertools.product(SIZES, SIZES, MICROBATCHES))
    wanted = {each for each in every if valid(*each)}
    found = {tuple(int(point.swept[f"strategy.{key}"]) for key in grid) for point in started.points}
    assert found == wanted
    assert 0 < len(wanted) < len(every)
    assert len(sessions[-1].skipped) == len(every) - len(wanted)
    assert all(each.reason and each.kind == "refused" for each in sessions[-1].skipped)
    rows = json.loads((tmp_path / "outputs/sweeps/s/results.json").read_text())["results"]
    assert sum(row["state"] == "skipped" for row in rows) == len(every) - len(wanted)
