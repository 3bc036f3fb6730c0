"""The only file that imports or touches private names of Lightning (2.6)."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.utilities.distributed import (
    _distributed_is_initialized,
    _get_default_process_group_backend_for_device,
    _init_dist_connection,
    _sync_ddp_if_available,
)
from lightning.fabric.utilities.rank_zero import rank_zero_only as lightning_rank_zero_only
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_only, rank_zero_warn
from torch import Tensor

from hybrid_strategy.strategy.children import end_with_this_process

__all__ = [
    "attach_mesh",
    "backend_for",
    "distributed_is_initialized",
    "hold_step_schedules",
    "init_process_group",
    "leave_samplers_alone",
    "make_script_launcher",
    "rank_zero_info",
    "rank_zero_warn",
    "ready_to_step",
    "reset_seed",
    "set_rank_zero",
    "stored_predictions",
    "sync_tensor",
]


def distributed_is_initialized() -> bool:
    return bool(_distributed_is_initialized())


def backend_for(device: torch.device) -> str:
    """The process-group backend that suits a device."""
    return str(_get_default_process_group_backend_for_device(device))


def init_process_group(environment: ClusterEnvironment, backend: str, timeout: timedelta, device: torch.device) -> None:
    """The default process group; the address of a world of one is nobody else's and does not stay in the environment."""
    before = {name: os.environ.get(name) for name in ("MASTER_ADDR", "MASTER_PORT")}
    _init_dist_connection(environment, backend, timeout=timeout, device_id=None if device.type == "cpu" else device)
    for name in [each for each, value in before.items() if value is None and environment.world_size() == 1]:
        os.environ.pop(name, None)


def sync_tensor(tensor: Tensor, group: Any, reduce_op: Any) -> Tensor:
    return _sync_ddp_if_available(tensor, group, reduce_op=reduce_op)


def make_script_launcher(environment: ClusterEnvironment, num_processes: int, num_nodes: int) -> Any:
    """Starts the other local ranks by running the user's script again, as Lightning's own strategies do."""
    launcher = _SubprocessScriptLauncher(environment, num_processes, num_nodes)
    end_with_this_process(launcher)
    return launcher


def attach_mesh(module: pl.LightningModule, mesh: Any) -> None:
    """Lets `module.device_mesh` answer, as under `ModelParallelStrategy`."""
    module._device_mesh = mesh


def leave_samplers_alone(trainer: pl.Trainer) -> None:
    """The strategy divides the samples itself, in `process_dataloader`; Lightning must not do it before."""
    trainer._accelerator_connector.use_distributed_sampler = False


def take_over_signals(trainer: pl.Trainer, listen: Callable[[], None], ignore: Callable[[], None]) -> None:
    """Lightning's own handlers save, or speak to other ranks, inside the handler, whatever the ranks are doing (2.6).

    Its loop asks rank 0 before every batch whether it was told to stop; the strategy asks all ranks, so that question goes too.
    """
    connector, loop = trainer._signal_connector, trainer.fit_loop.epoch_loop
    connector.register_signal_handlers = listen  # type: ignore[method-assign]
    connector.teardown = ignore  # type: ignore[method-assign]
    setattr(loop, "_broadcast_sigterm_tensor", lambda: None)  # noqa: B010 - absent in some 2.x


def requeue_path(trainer: pl.Trainer) -> str:
    """Where a job that Slurm starts again looks for its checkpoint by itself, and `ckpt_path="hpc"` does."""
    return str(trainer._checkpoint_connector.hpc_save_path(trainer.default_root_dir))


def give_back_signals(trainer: pl.Trainer) -> None:
    """Undoes `take_over_signals`."""
    vars(trainer._signal_connector).pop("register_signal_handlers", None)
    vars(trainer._signal_connector).pop("teardown", None)


def let_children_leave(launcher: object) -> None:
    """Ranks that the script launcher started may end with a code that is not 0: its observer would kill this process for it."""
    if isinstance(launcher, _SubprocessScriptLauncher):
        launcher.procs.clear()  # the list that the observer reads


def set_rank_zero(rank: int) -> None:
    for decorator in (rank_zero_only, lightning_rank_zero_only):
        setattr(decorator, "rank", rank)  # noqa: B010 - functions have no typed attributes


def ready_to_step(trainer: pl.Trainer) -> bool:
    """Does the optimizer step after this batch, or are gradients accumulated further?"""
    return not trainer.fit_loop._should_accumulate()


def hold_step_schedules(trainer: pl.Trainer, held: Callable[[], bool]) -> None:
    """Leaves out the schedulers that follow optimizer steps while `held()`."""
    loop = trainer.fit_loop.epoch_loop

    def update(interval: str, update_plateau_schedulers: bool) -> None:
        if interval != "step" or not held():
            type(loop).update_lr_schedulers(loop, interval, update_plateau_schedulers)

    loop.update_lr_schedulers = update  # type: ignore[method-assign]


def stored_predictions(trainer: pl.Trainer) -> list[list[Any]]:
    """What `trainer.predict` is about to return, a list of batches for each loader."""
    return trainer.predict_loop._predictions


def stage_of(trainer: pl.Trainer) -> str:
    """`train`, `validate`, `sanity_check`, `test` or `predict`."""
    return str(trainer.state.stage.value)  # type: ignore[union-attr]
