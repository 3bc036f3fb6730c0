"""Starts the processes of a check, fresh ones, and leaves the records of all ranks in a folder."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from hybrid_strategy.errors import ConfigError, message
from hybrid_strategy.launch.failures import WorkerFailedError
from hybrid_strategy.launch.job import Job
from hybrid_strategy.launch.launchers.local import LocalLauncher
from hybrid_strategy.parity import worker
from hybrid_strategy.parity.files import LAYOUT, REFERENCE
from hybrid_strategy.parity.request import ParityRequest

_INSIDE = "HYBRID_STRATEGY_PARITY"


def run_both(request: ParityRequest, folder: Path) -> None:
    """Runs the reference, then the layout; their records lie in `folder/reference` and `folder/layout`.

    Raises:
        ConfigError: something cannot be sent to another process.
        WorkerFailedError: a rank failed or did not end in time; carries the first failure.
    """
    _refuse_inside()
    request = _placed(request)
    _write(folder, request)
    environment = {_INSIDE: "1", **({"CUDA_VISIBLE_DEVICES": ""} if request.options.accelerator == "cpu" else {})}
    for name, world_size in ((REFERENCE, 1), (LAYOUT, request.world_size)):
        try:
            LocalLauncher().run(Job(f"{worker.__name__}:{name}", folder / name, world_size, environment))
        except WorkerFailedError as error:
            raise WorkerFailedError(f"{error}\nin the {name} run", error.exit_code) from None


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """A folder that is gone afterwards; where a rank failed the logs stay, for the error names them."""
    folder = Path(tempfile.mkdtemp(prefix="hybrid-parity-"))
    try:
        yield folder
    except WorkerFailedError:
        for each in folder.glob("*/rank*"):
            shutil.rmtree(each, ignore_errors=True)
        raise
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    shutil.rmtree(folder, ignore_errors=True)


def _placed(request: ParityRequest) -> ParityRequest:
    """The request with `auto` decided: both runs compute on the same kind of device."""
    if request.options.accelerator != "auto":
        return request
    accelerator = "cuda" if torch.cuda.is_available() and torch.cuda.device_count() >= request.world_size else "cpu"
    return replace(request, options=replace(request.options, accelerator=accelerator))


def _write(folder: Path, request: ParityRequest) -> None:
    try:
        worker.write_request(folder, request)
    except Exception as error:  # pickle raises what the objects raise
        rule = "the processes of the check make it anew, so it must be picklable"
        advice = "Give a class or a function of a module, not a lambda or a local function"
        raise ConfigError(
            message("module_factory, datamodule or strategy", type(error).__name__, rule, str(error), advice)
        ) from error


def _refuse_inside() -> None:
    if _INSIDE in os.environ:
        rule = "the processes of a check import the script that asked for it, which must not ask again"
        advice = 'Call it under `if __name__ == "__main__":`'
        raise ConfigError(message("check_parity", "called while a script is imported", rule, "", advice))
