"""The parity gate on the pool of test processes: records and verdict as of `check_parity`, without the start-up.

One process's record is kept for the whole session: layouts with the same module, data and Trainer arguments share it.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import pickle
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

_references: dict[bytes, Path] = {}


def _quieten() -> None:
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)


def _reference(request: ParityRequest, folder: Path) -> None:
    _quieten()
    record_reference(request, folder)


def _layout(request: ParityRequest, folder: Path, plant: Plant) -> None:
    _quieten()
    with plant():
        record_layout(request, folder)


@atexit.register
def _remove_references() -> None:
    for folder in _references.values():
        shutil.rmtree(folder, ignore_errors=True)


def _reference_of(request: ParityRequest) -> RunRecord:
    decisive = {key: request.strategy.get(key) for key in ("module", "seed", "parallel_plan")}
    key = pickle.dumps(
        (request.module, request.data, decisive, request.layout.data_parallel_size, request.steps, request.options)
    )
    if key not in _references:
        folder = Path(tempfile.mkdtemp(prefix="reference-"))
        run_ranks(_reference, 1, request, folder, process_group=False)
        _references[key] = folder
    return RunRecord(_references[key], 1)


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
    """Compares a layout, with a fault planted into its ranks, with one process.

    Raises:
        ConfigError: refused before anything was started.
        RankFailedError: a rank raised or hung.
    """
    options = ParityOptions(trainer=trainer or {}, accelerator="cpu", seed=3)
    request = make_request(module, data, strategy, steps, devices, options)
    reference = _reference_of(request)
    with tempfile.TemporaryDirectory(prefix="layout-") as name:
        run_ranks(_layout, request.world_size, request, Path(name), plant, process_group=False)
        return judge(request, reference, RunRecord(Path(name), request.world_size))
