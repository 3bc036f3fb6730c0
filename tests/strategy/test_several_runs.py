"""Several runs in one process: what one leaves behind must not grow with their number."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.utils.data import DataLoader

from hybrid_strategy import HybridParallelStrategy
from hybrid_strategy.errors import ConfigError
from tests.support.ranks import environment_of, run_ranks
from tests.support.training import Case, TinyLM, Tokens, train_here

LAYOUTS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "zero1": {"sharding": "zero1"},
    "zero3": {"sharding": "zero3"},
    "tp2": {"tensor_parallel_size": 2, "sequence_parallel": True},
    "pp2": {"pipeline_parallel_size": 2, "num_microbatches": 2, "activation_checkpoint": "full"},
    "cp2": {"context_parallel_size": 2},
}


def _threads_of_groups() -> int:
    """Threads that process groups keep for their messages."""
    names = [path.joinpath("comm") for path in Path("/proc/self/task").iterdir()]
    return sum(name.read_text().startswith("gloo") for name in names if name.exists())


def _run(strategy: dict[str, Any]) -> int:
    """Threads that the runs before have left; then one more run."""
    gc.collect()
    found = _threads_of_groups()
    train_here(Case(strategy=strategy, steps=1, trainer={"limit_val_batches": 0}))
    return found


@pytest.mark.parametrize("name", LAYOUTS)
def test_process_groups_of_earlier_runs_are_freed(name: str) -> None:
    found = [run_ranks(_run, 2, LAYOUTS[name], process_group=False) for _ in range(5)]
    for rank in range(2):
        after = [each[rank] for each in found[1:]]
        assert after[-1] <= after[0], after


def _left_in_the_environment() -> dict[str, str | None]:
    for name in (*environment_of(0, 1, 0), "OMP_NUM_THREADS"):
        os.environ.pop(name, None)
    before = dict(os.environ)
    quiet: dict[str, Any] = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    pl.Trainer(accelerator="cpu", devices=1, strategy="hybrid", max_steps=1, limit_val_batches=0, **quiet).fit(BoringModel())
    return {name: os.environ.get(name) for name in {*before, *os.environ} if os.environ.get(name) != before.get(name)}


def test_a_run_of_one_process_leaves_the_environment_alone() -> None:
    """Else a process started afterwards is a rank of the run that has ended, and waits for the others."""
    assert run_ranks(_left_in_the_environment, 1, process_group=False) == [{}]


def _begun_twice(path: str) -> str:
    """What a second Trainer says to initial weights for the module of a first."""
    module = TinyLM()
    loader = DataLoader(Tokens(8), batch_size=8)
    for strategy in (HybridParallelStrategy(), HybridParallelStrategy(initial_weights=path)):
        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
        trainer = pl.Trainer(accelerator="cpu", devices=1, strategy=strategy, max_steps=1, limit_val_batches=0, **quiet)
        try:
            trainer.fit(module, loader)
        except ConfigError as error:
            return str(error)
    return ""


def test_a_second_trainer_refuses_initial_weights_that_it_would_ignore(tmp_path: Path) -> None:
    (weights := tmp_path / "weights.safetensors").touch()
    (text,) = run_ranks(_begun_twice, 1, str(weights), process_group=False)
    assert text.startswith(f"initial_weights is '{weights}': an earlier Trainer has given the module its weights")
    assert text.endswith("Leave it out of all but the first Trainer, or build the module anew.")
