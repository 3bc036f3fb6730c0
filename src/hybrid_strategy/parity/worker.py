"""What the processes of a check run: `reference` in one, `layout` in as many as the layout has."""

from __future__ import annotations

import faulthandler
import logging
import multiprocessing.spawn
import os
import pickle
import sys
import threading
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from torch.utils.data import DataLoader

from hybrid_strategy.errors import RunError, message
from hybrid_strategy.launch import failures
from hybrid_strategy.parity.files import rank_folder
from hybrid_strategy.parity.recorder import LayoutRecorder, Recorder, ReferenceRecorder
from hybrid_strategy.parity.reference import OneProcessStrategy
from hybrid_strategy.parity.request import ParityRequest, made, trainer_arguments
from hybrid_strategy.strategy.hybrid import HybridParallelStrategy

_REQUEST_FILE = "request.pkl"
_BACKSTOP_SECONDS = 15.0
"""A thread that holds the interpreter's lock keeps Python's own watchdog from acting; this much later C code does."""


class HangError(RunError):
    """A run that did not end in time."""


@dataclass(frozen=True)
class _Parcel:
    """A pickled request, and what unpickling needs to find the classes of the script that asked."""

    preparation: dict[str, Any]
    request: bytes


# ------------------------------------------------------------------------------------------------------------ the parent


def write_request(folder: Path, request: ParityRequest) -> None:
    """Puts the request where the processes find it.

    Raises:
        Exception: what pickle raises where something cannot be sent to another process.
    """
    payload = pickle.dumps(request)
    preparation = multiprocessing.spawn.get_preparation_data("parity")
    kept = ["sys_path", "dir"]
    if b"__main__" in payload:
        kept += ["sys_argv", "init_main_from_name", "init_main_from_path"]
    parcel = _Parcel({key: preparation[key] for key in kept if key in preparation}, payload)
    (folder / _REQUEST_FILE).write_bytes(pickle.dumps(parcel))


def read_request(folder: Path) -> ParityRequest:
    """The request, in a fresh process."""
    parcel = pickle.loads((folder / _REQUEST_FILE).read_bytes())
    multiprocessing.spawn.prepare(parcel.preparation)
    request: ParityRequest = pickle.loads(parcel.request)
    return request


# ------------------------------------------------------------------------------------------------------------- the ranks


def reference(run_dir: Path) -> None:
    """The target of the launcher for the one process."""
    _as_rank(run_dir, record_reference)


def layout(run_dir: Path) -> None:
    """The target of the launcher for every rank of the layout."""
    _as_rank(run_dir, record_layout)


def record_reference(request: ParityRequest, folder: Path) -> None:
    """Trains in this process as plain Lightning does and records into `folder`."""
    device = torch.device("cuda", 0) if request.options.accelerator == "cuda" else torch.device("cpu")
    options = HybridParallelStrategy(**request.strategy).options
    strategy = OneProcessStrategy(device, request.layout.data_parallel_size, options)
    _train(request, strategy, 1, ReferenceRecorder(rank_folder(folder, 0), request.steps, options))


def record_layout(request: ParityRequest, folder: Path) -> None:
    """Trains as one rank of the layout and records into `folder`."""
    strategy = HybridParallelStrategy(**request.strategy, cluster_environment=TorchElasticEnvironment())
    rank = int(os.environ.get("RANK", "0"))
    _train(request, strategy, request.world_size, LayoutRecorder(rank_folder(folder, rank), request.steps))


def _train(request: ParityRequest, strategy: Any, devices: int, recorder: Recorder) -> None:
    options = request.options
    torch.set_float32_matmul_precision(options.float32_matmul)
    pl.seed_everything(options.seed, workers=True, verbose=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = pl.Trainer(
            **trainer_arguments(request),
            accelerator=options.accelerator,
            devices=devices,
            strategy=strategy,
            callbacks=[recorder],
        )
        module = made(request.module, pl.LightningModule, "module_factory")
        data = None if request.data is None else made(request.data, (pl.LightningDataModule, DataLoader), "datamodule")
        key = "datamodule" if isinstance(data, pl.LightningDataModule) else "train_dataloaders"
        trainer.fit(module, **{key: data})


def _as_rank(run_dir: Path, record: Callable[[ParityRequest, Path], None]) -> None:
    """Runs one rank with a limit of time, its output in its log only."""
    sys.stdout = os.fdopen(1, "w", encoding="utf-8", errors="replace", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", encoding="utf-8", errors="replace", buffering=1, closefd=False)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    request = read_request(run_dir.parent)
    _watch(run_dir, request.options.timeout_seconds)
    record(request, run_dir)


def _watch(run_dir: Path, seconds: float) -> None:
    """Ends this process, with a report of where it stood, when `seconds` are over."""
    rank, main = int(os.environ.get("RANK", "0")), threading.main_thread().ident

    def end() -> None:
        frame = sys._current_frames().get(main or 0)
        stack = "".join(traceback.format_stack(frame)) if frame else ""
        advice = "Look at where it stands, or set a longer time"
        rule = "the run did not end in this time"
        error = HangError(message("timeout_seconds", seconds, rule, "", advice) + f"\nrank {rank} stood here:\n{stack}")
        failures.record(run_dir / "logs", rank, error)
        os.write(2, str(error).encode())
        os._exit(1)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    faulthandler.dump_traceback_later(seconds + _BACKSTOP_SECONDS, exit=True, file=2)
