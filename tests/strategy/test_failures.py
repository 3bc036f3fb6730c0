"""A rank that fails, or hangs, ends the run: with its own traceback, and with the place of those that waited for it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from tests.contract.layouts import LAYOUTS
from tests.contract.models import Module, Rows, loader, make_trainer, quiet
from tests.support.forks import Ending, run_cases
from tests.support.ranks import free_port

MODULE_HOOKS = (
    "setup",
    "configure_model",
    "configure_optimizers",
    "on_fit_start",
    "on_train_start",
    "on_train_epoch_start",
    "on_train_batch_start",
    "on_after_batch_transfer",
    "training_step",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
    "on_validation_start",
    "validation_step",
    "on_validation_batch_end",
    "on_validation_epoch_end",
    "on_train_epoch_end",
    "on_train_end",
)
CASES = [
    (name, hook, rank)
    for index, hook in enumerate((*MODULE_HOOKS, "dataset", "callback"))
    for name, rank in ((("pp2_1f1b", "dp2_zero3")[index % 2], 1), (("pp2_1f1b", "dp2")[index % 2], 0))
]


class PlantedError(Exception):
    """What the user's code raises."""


class Unreadable(Rows):
    """Its third row cannot be read on one rank; an `IndexError` must not look like the end of the data."""

    def __init__(self, fails: bool) -> None:
        super().__init__(16)
        self.fails = fails

    def __getitem__(self, index: int) -> Any:
        if self.fails and index in (2, 6):
            raise IndexError("planted in the dataset")
        return super().__getitem__(index)


class Raising(pl.Callback):
    def on_train_batch_end(self, *_: Any) -> None:
        raise PlantedError("planted in callback")


def _plant(module: Module, hook: str) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise PlantedError(f"planted in {hook}")

    object.__setattr__(module, hook, fail)


def _fit(name: str, hook: str, rank: int) -> None:
    layout = LAYOUTS[name]
    here = int(os.environ["RANK"]) == rank
    module = Module()
    module.validation_step = lambda batch, batch_idx: module.loss(batch)
    if here and hook in MODULE_HOOKS:
        _plant(module, hook)
    callbacks = [Raising()] if here and hook == "callback" else []
    data = loader(layout, 16)
    if hook == "dataset":
        data = torch.utils.data.DataLoader(Unreadable(here), batch_size=layout.batch_size)
    with quiet():
        make_trainer(layout, max_epochs=2, callbacks=callbacks).fit(module, data, loader(layout, 8))


@pytest.fixture(scope="module")
def endings() -> dict[Any, list[Ending]]:
    return dict(zip(CASES, run_cases(_fit, 2, CASES, limit=30), strict=True))


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_an_exception_ends_all_ranks_with_its_traceback(case: tuple[str, str, int], endings: Any) -> None:
    _, hook, rank = case
    found = endings[case]
    assert f"planted in {'the dataset' if hook == 'dataset' else hook}" in found[rank].traceback
    other = found[1 - rank]
    if hook != "on_train_end":  # after the last collective: the other rank has done its work
        assert other.traceback, "the other rank went on, or had to be killed"
    assert "planted" not in (other.traceback or "")
    assert other.seconds - found[rank].seconds < 2.0


def _hang(name: str, where: str) -> None:
    layout = LAYOUTS[name]
    here = os.environ["RANK"] == "1"

    class Hanging(Module):
        calls = 0

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.calls += 1
            if here and where == "step" and self.global_step == 1 and (not layout.pipelined or batch["row"][0] == 4 + 8):
                time.sleep(60)
            return super().training_step(batch, batch_idx)

        def on_train_batch_end(self, *_: Any) -> None:
            if here and where == "hook" and self.global_step == 2:
                time.sleep(60)
            self.log("ended", 1.0)

    with quiet():
        make_trainer(layout, {"timeout": 2.0}, max_epochs=2).fit(Hanging(), loader(layout, 16))


HANGS = {
    ("pp2_1f1b", "step"): "(batch 1, epoch 0, global step 1): stage 0, micro-batch 2, action 0B2 (backward)",
    ("dp2", "step"): "(batch 1, epoch 0, global step 1): the exchange of loss and logged values",
    ("dp2_zero3", "step"): "stage 0, micro-batch 0, action 0F0 (forward)",
    ("dp2", "hook"): "was in the exchange of what hooks logged, at batch end",
}


def test_a_rank_that_waits_in_vain_says_where() -> None:
    for case, found in zip(HANGS, run_cases(_hang, 2, list(HANGS), limit=20), strict=True):
        assert HANGS[case] in found[0].traceback, found[0].traceback[-1500:]
        assert "rank 0 (pipeline_parallel 0, data_parallel 0, tensor_parallel 0)" in found[0].traceback
        assert "timeout=2 s" in found[0].traceback
        assert found[0].seconds < 12
        assert found[1].traceback == "", "it hangs in the user's code: the launcher ends it"


SCRIPT = """
import os, sys, time
from tests.contract.layouts import LAYOUTS
from tests.contract.models import Module, loader, make_trainer, quiet

class Failing(Module):
    def on_train_batch_end(self, *_):
        if os.environ.get("LOCAL_RANK", "0") == sys.argv[1]:
            raise ValueError(f"planted on rank {sys.argv[1]}")
        time.sleep(100)

layout = LAYOUTS["dp2"]
open(f"pid{os.environ.get('LOCAL_RANK', '0')}", "w").write(str(os.getpid()))
make_trainer(layout, max_epochs=2).fit(Failing(), loader(layout, 16))
"""


def _has_ended(process: int) -> bool:
    """Within two seconds; one that has ended and that nobody has reaped yet counts."""
    for _ in range(20):
        status = Path(f"/proc/{process}/stat")
        if not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z":
            return True
        time.sleep(0.1)
    return False


@pytest.mark.parametrize("rank", [0, 1])
def test_a_plain_script_ends_where_the_other_rank_is_in_the_users_code(rank: int, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    root = Path(__file__).parents[2]
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    environment |= {"PYTHONPATH": f"{root / 'src'}:{root}", "OMP_NUM_THREADS": "1", "MASTER_PORT": str(free_port())}
    found = subprocess.run(
        [sys.executable, "script.py", str(rank)], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
    )
    assert found.returncode != 0
    assert f"ValueError: planted on rank {rank}" in found.stderr
    for each in (0, 1):
        assert _has_ended(int((tmp_path / f"pid{each}").read_text()))
