"""`check_parity`: the gate as a function."""

from __future__ import annotations

from typing import Any

from hybrid_strategy.parity.files import LAYOUT, REFERENCE
from hybrid_strategy.parity.processes import run_both, temporary_folder
from hybrid_strategy.parity.records import RunRecord
from hybrid_strategy.parity.report import ParityReport
from hybrid_strategy.parity.request import ParityOptions, ParityRequest, Strategy, make_request
from hybrid_strategy.parity.verdict import judge


def check_parity(
    module_factory: Any,
    datamodule: Any = None,
    strategy: Strategy = None,
    steps: int = 3,
    devices: int | None = None,
    options: ParityOptions | None = None,
) -> ParityReport:
    """Trains a module for a few steps in one process and in a layout, in fresh processes, and compares every number.

    Both runs start from the same weights and read the same samples. Compared are the initial weights bit for bit, the loss, the
    gradient norm, and every parameter's gradient and value after each step.

    Args:
        module_factory: the class of a LightningModule, a function or `functools.partial` that makes one, or one. It goes to other
            processes, so it must be picklable: no lambda, and a script that calls this does so under
            `if __name__ == "__main__":`.
        datamodule: the same for a LightningDataModule or a training DataLoader; `None` where the module has its own loader. Its
            batch is what one data-parallel rank consumes at once.
        strategy: a `HybridParallelStrategy` or its arguments.
        steps: optimizer steps to compare.
        devices: processes of the layout; default: the product of the sizes, one copy where the data-parallel size is `auto`.
        options: Trainer arguments of both runs (precision, clipping, accumulation), seed, device, limit of time.

    Returns:
        The report; `report.same` is the verdict, `report.raise_if_different()` makes it an error.

    Raises:
        ConfigError: the layout cannot be honoured, or something cannot be sent to another process.
        WorkerFailedError: a rank failed or did not end in time; its message is the first failing rank's traceback.
    """
    return run_check(make_request(module_factory, datamodule, strategy, steps, devices, options))


def run_check(request: ParityRequest) -> ParityReport:
    """Runs a request, which `make_request` has checked, and judges it."""
    with temporary_folder() as folder:
        run_both(request, folder)
        reference = RunRecord(folder / REFERENCE, 1)
        return judge(request, reference, RunRecord(folder / LAYOUT, request.world_size))
