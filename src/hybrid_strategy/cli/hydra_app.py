"""Hydra's own way of running an application, with our configurations and our exit codes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from hybrid_strategy.cli.arguments import Arguments
from hybrid_strategy.config.compose import VERSION_BASE, Source, run_config
from hybrid_strategy.config.folders import shipped_folder
from hybrid_strategy.config.overrides import checked
from hybrid_strategy.config.schema import read, register
from hybrid_strategy.config.settings import RunConfig
from hybrid_strategy.errors import HybridError
from hybrid_strategy.sweeping.session import Session, attach

Point = Callable[[RunConfig, Path], None]
"""Runs one point of a sweep, or the only one, in its run folder."""

SWEEP_FAILED = 5


def run_app(arguments: Arguments, point: Point, session: Session | None = None) -> int:
    """Lets Hydra run `point` once, or once for each point of a sweep; answers `--cfg` and `--info`.

    A single run's errors are raised. A sweep goes on after a failed point and returns 5.

    Args:
        session: what our own sweepers and launchers share; others call `point` themselves.
    """
    failures: list[HybridError] = []

    def task(config: DictConfig) -> str | None:
        """Text where it failed: a launcher of others may call this in another process, where nobody sees `failures`."""
        run_dir = Path(HydraConfig.get().runtime.output_dir)
        try:
            point(read(config, str(run_dir)), run_dir)
        except HybridError as error:
            failures.append(error)
            if arguments.multirun:
                print(f"{run_dir}: {error}", file=sys.stderr)
            return f"{run_dir}: {error}"
        return None

    if session is not None:
        attach(task, session)
    try:
        _call_hydra(arguments, task)
    except SystemExit as end:  # Hydra has printed what was wrong with a configuration
        return 2 if end.code == 1 else int(end.code or 0)
    if failures and not arguments.multirun:
        raise failures[0]
    return SWEEP_FAILED if failures else 0


def _call_hydra(arguments: Arguments, task: Callable[[DictConfig], str | None]) -> None:
    register()
    source = arguments.source
    flags = [*arguments.hydra_flags, *(["--multirun"] if arguments.multirun and not arguments.hydra_flags else [])]
    if source.config_dir is not None:
        flags += ["--config-dir", source.config_dir]
    argv = sys.argv
    sys.argv = ["hybrid", *flags, "--config-name", source.config_name, *checked(source.overrides)]
    try:
        hydra.main(config_path=str(shipped_folder("conf")), config_name=source.config_name, version_base=VERSION_BASE)(task)()
    finally:
        sys.argv = argv


def check_first(source: Source, check: Callable[[RunConfig], object]) -> None:
    """Composes and checks a single run before Hydra makes its folder, so that a refusal leaves nothing behind."""
    check(run_config(source))
