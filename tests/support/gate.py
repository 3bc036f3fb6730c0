"""The parity gate on the pool of test processes: records and verdict as of `check_parity`, without the start-up."""

from __future__ import annotations

import contextlib
import logging
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hybrid_strategy.parity.records import RunRecord
from hybrid_strategy.parity.report import ParityReport
from hybrid_strategy.parity.request import ParityOptions, ParityRequest, make_request
from hybrid_strategy.parity.verdict import judge
from hybrid_strategy.parity.worker import record_layout, record_reference
from tests.support.ranks import run_ranks

Plant = Callable[[], contextlib.AbstractContextManager[Any]]
"""A fault: a top-level function that returns a context in which something is wrong."""


def _quieten() -> None:
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)


def _reference(request: ParityRequest, folder: str) -> None:
    _quieten()
    record_reference(request, Path(folder))


def _layout(request: ParityRequest, folder: str, plant: Plant) -> None:
    _quieten()
    with plant():
        record_layout(request, Path(folder))


def gate(
    module: Any,
    data: Any,
    strategy: dict[str, Any],
    *,
    steps: int = 2,
    devices: int | None = None,
    trainer: dict[str, Any] | None = None,
    plant: Plant = contextlib.nullcontext,
) -> ParityReport:
    """Compares a layout, with a fault planted into its ranks, with one process."""
    options = ParityOptions(trainer=trainer or {}, accelerator="cpu", seed=3)
    request = make_request(module, data, strategy, steps, devices, options)
    folder = tempfile.mkdtemp()
    try:
        run_ranks(_reference, 1, request, f"{folder}/reference", process_group=False)
        run_ranks(_layout, request.world_size, request, f"{folder}/layout", plant, process_group=False)
        return judge(request, RunRecord(Path(folder) / "reference", 1), RunRecord(Path(folder) / "layout", request.world_size))
    finally:
        shutil.rmtree(folder)
