"""A checkpoint of any layout continues in any other: weights and moments bit-equal, then the uninterrupted run's numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hybrid_strategy.checkpoint.loading import load_checkpoint, saved_names
from hybrid_strategy.checkpoint.pieces import Piece
from tests.support.training import Case, TinyLM, assemble, compare, train

GLOBAL_BATCH = 12
ROWS = 72  # six steps an epoch, so that the continuation crosses into a second, reshuffled epoch
PIPELINE = {"pipeline_parallel_size": 2, "num_microbatches": 2}

LAYOUTS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "single": (1, 1, {}),
    "dp2": (2, 2, {}),
    "dp3_zero1": (3, 3, {"sharding": "zero1"}),
    "dp2_zero2": (2, 2, {"sharding": "zero2"}),
    "dp3_zero3": (3, 3, {"sharding": "zero3"}),
    "tp2_sequence_parallel": (2, 1, {"tensor_parallel_size": 2, "sequence_parallel": True}),
    "pp2_interleaved": (2, 1, {**PIPELINE, "schedule": "Interleaved1F1B"}),
    "dp2_pp2_zero1": (4, 2, {**PIPELINE, "sharding": "zero1"}),
}


class SavingLM(TinyLM):
    """Saves when training starts or ends."""

    def __init__(self, shape: Any, save_to: str = "", save_at: str = "end", **arguments: Any) -> None:
        super().__init__(shape, **arguments)
        self.save_to, self.save_at = save_to, save_at

    def on_train_start(self) -> None:
        if self.save_to and self.save_at == "start":
            self.trainer.save_checkpoint(self.save_to)

    def on_train_end(self) -> None:
        if self.save_to and self.save_at == "end":
            self.trainer.save_checkpoint(self.save_to)


def run(name: str, steps: int, **more: Any) -> list[dict[str, Any]]:
    world_size, data_parallel_size, arguments = LAYOUTS[name]
    case = Case(
        strategy=arguments,
        batch_size=GLOBAL_BATCH // data_parallel_size,
        rows=ROWS,
        steps=steps,
        module=SavingLM,
        module_arguments={"save_to": more.pop("save_to", ""), "save_at": more.pop("save_at", "end")},
        **more,
    )
    return train(case, world_size)


def numbers(records: list[dict[str, Any]], first: int) -> list[dict[str, Any]]:
    """Steps from `first` on. Epoch means are left out: Lightning begins them anew when it restarts within an epoch."""
    return [{"initial": {}, "steps": [{**step, "logged": {}} for step in record["steps"][first:]]} for record in records]


@pytest.fixture(scope="module")
def straight() -> list[dict[str, Any]]:
    return run("single", steps=8)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """After four of eight steps, in the middle of an epoch, one checkpoint a layout."""
    folder = tmp_path_factory.mktemp("saved")
    for name in LAYOUTS:
        run(name, steps=4, save_to=str(folder / name))
    return {name: folder / name for name in LAYOUTS}


NAMES = list(LAYOUTS)
PAIRS = [(source, NAMES[(index + step) % len(NAMES)]) for index, source in enumerate(NAMES) for step in (0, 3, 5)]


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_goes_on_in_another_layout(source: str, target: str, saved: dict[str, Path], straight: list[dict[str, Any]]) -> None:
    records = run(target, steps=8, checkpoint=str(saved[source]))
    loaded = assemble(records, lambda record: record["initial"])
    for name, value in assemble(straight, lambda record: record["steps"][3]["weights"]).items():
        torch.testing.assert_close(loaded[name], value, rtol=1e-5, atol=1e-5)
    compare(numbers(straight, 4), numbers(records, 0))


def test_loads_bit_for_bit(saved: dict[str, Path], tmp_path: Path) -> None:
    """Saved by one layout, loaded and saved at once by another, loaded by a third: not a bit of a weight or moment changes."""
    again = {"save_to": str(tmp_path / "again"), "save_at": "start"}
    run("dp3_zero3", steps=5, checkpoint=str(saved["tp2_sequence_parallel"]), **again)
    before, after = read_all(saved["tp2_sequence_parallel"]), read_all(tmp_path / "again")
    assert before.keys() == after.keys()
    assert any(key.endswith("exp_avg") for key in before)
    assert all(torch.equal(value, after[key]) for key, value in before.items())


def read_all(path: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, whole."""
    pieces = {key: Piece.whole(key, torch.zeros(each.shape, dtype=each.dtype)) for key, each in saved_names(path).items()}
    load_checkpoint(path, pieces)
    return {key: piece.tensor for key, piece in pieces.items()}
