"""Points that run for real and log to TensorBoard: one run a point, and one that is put back at its last step loses nothing."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from math import inf, nan
from pathlib import Path

import lightning.pytorch as pl
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from hybrid_strategy.callbacks.results import RunResults

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SWEEP = (
    *("-m", "model=llama_tiny", "data.sequence_length=32", "data.global_batch_size=8", "data.files=[text.txt]"),
    *("trainer=cpu", "trainer.max_steps=3", "trainer.limit_val_batches=2", "trainer.log_every_n_steps=1"),
    *("strategy=single,pp2", "logger=tensorboard", "name=s"),
)


def _train(folder: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "HYBRID_STRATEGY_CACHE": str(folder / "cache")}
    command = [sys.executable, "-m", "hybrid_strategy.cli.main", "train", *SWEEP]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=140, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def _rows(sweep: Path) -> dict[str, dict[str, str]]:
    with (sweep / "results.csv").open() as file:
        return {row["point"]: row for row in csv.DictReader(file)}


def _scalars(point: Path) -> dict[str, list[tuple[int, float]]]:
    found = EventAccumulator(str(point / "tensorboard")).Reload()
    return {tag: [(each.step, each.value) for each in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def _logged(point: Path, name: str) -> list[tuple[int, float]]:
    with (point / "metrics.csv").open() as file:
        return [(int(row["step"]), float(row[name])) for row in csv.DictReader(file) if row[name]]


def test_metrics_are_in_tensorboard_and_a_point_that_was_finished_keeps_its_results(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("\n".join(f"line {number} of a text, {number * 7919 % 1000}" for number in range(3000)))
    _train(tmp_path)
    sweep = tmp_path / "outputs/sweeps/s"
    for name in ("single", "pp2"):
        scalars = _scalars(sweep / name)
        assert len(list(sweep.glob(f"{name}/**/events.out.*"))) == len(list(sweep.glob(f"{name}/tensorboard/events.out.*")))
        for metric in ("train_loss", "val_loss"):
            logged = _logged(sweep / name, metric)
            assert len(logged) >= 2
            assert scalars[metric] == [(step, pytest.approx(value, rel=1e-6)) for step, value in logged]
    before, row = json.loads((sweep / "single/result.json").read_text()), _rows(sweep)["single"]

    (sweep / "single/result.json").unlink()  # stopped after its last step, before it could write what it had reached
    state = json.loads((sweep / "single/state.json").read_text())
    (sweep / "single/state.json").write_text(json.dumps({**state, "state": "running"}))
    _train(tmp_path)
    after, again = json.loads((sweep / "single/result.json").read_text()), _rows(sweep)["single"]
    assert after["attempts"] == 2
    for name in ("steps", "first_validation_loss", "last_validation_loss", "best_validation_loss", "validation_metric"):
        assert after[name] == before[name], name
    assert [name for name, value in row.items() if value and not again[name]] == []
    assert [step for step, _ in _logged(sweep / "single", "train_loss")] == [0, 1, 2]


@pytest.mark.parametrize(
    ("losses", "best"), [((3.0, nan, 2.0), 2.0), ((nan, 2.0), 2.0), ((2.0, nan), 2.0), ((2.0, -inf), 2.0), ((), None)]
)
def test_the_best_loss_is_finite_wherever_another_stands(losses: tuple[float, ...], best: float | None) -> None:
    made, trainer = RunResults(), pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    made.load_state_dict({"metric": "val_loss", "validation": [[step, loss] for step, loss in enumerate(losses)]})
    assert made.summary(trainer)["best_validation_loss"] == best
    assert len(made.state_dict()["validation"]) == len(losses)
