"""Hydra's launchers `local` and `slurm`: doors to `hybrid_strategy.sweeping`, imported only when they are used."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


class LocalSweepLauncher(Launcher):
    """Points on this machine, each in a process tree of its own."""

    kind = "local"

    def __init__(self, **settings: Any) -> None:
        self.settings = settings

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.hydra_context, self.task_function, self.config = hydra_context, task_function, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        from hybrid_strategy.sweeping.launchers import launch_as

        return launch_as(self.kind, self.hydra_context, self.task_function, self.config, job_overrides, initial_job_idx)


class SlurmLauncher(LocalSweepLauncher):
    """Points as Slurm jobs, each with the resources of its layout."""

    kind = "slurm"
