"""The launchers by name: how the settings of each become a runner."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hydra.core.utils import JobReturn
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

from hybrid_strategy.sweeping.launching import Launch, Runner, launch
from hybrid_strategy.sweeping.local import LocalRunner, local_settings
from hybrid_strategy.sweeping.prepare import Batch, Ready
from hybrid_strategy.sweeping.session import Session, session_of
from hybrid_strategy.sweeping.slurm.runner import show_scripts, slurm_runner


def launch_as(
    kind: str,
    context: HydraContext,
    task_function: TaskFunction,
    config: DictConfig,
    overrides: Sequence[Sequence[str]],
    first: int,
) -> list[JobReturn]:
    """What the doors in `hydra_plugins` call."""
    settings = OmegaConf.to_container(config.hydra.launcher, resolve=True)
    assert isinstance(settings, dict)
    plain = {str(key): value for key, value in settings.items()}
    task = Launch(kind, plain, RUNNERS[kind], SHOWS[kind])
    return launch(task, Batch(context.config_loader, config, overrides, first, kind == "local"), session_of(task_function, kind))


def local_runner(settings: Mapping[str, Any], session: Session) -> Runner:
    """Points on this machine."""
    return LocalRunner(local_settings(settings), session.entry)


def check_local(settings: Mapping[str, Any], session: Session, ready: Sequence[Ready]) -> bool:
    """A launcher without a dry run: checks what each point is told, before anything is written."""
    for each in ready:
        local_settings(each.point.launcher)
    return False


RUNNERS: dict[str, Callable[[Mapping[str, Any], Session], Runner]] = {"local": local_runner, "slurm": slurm_runner}
SHOWS: dict[str, Callable[[Mapping[str, Any], Session, Sequence[Ready]], bool]] = {"local": check_local, "slurm": show_scripts}
