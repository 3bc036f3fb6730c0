"""`hybrid train`: checks, prints the plan, starts the ranks, sums up."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig

from hybrid_strategy import registry
from hybrid_strategy.checkpoint.search import Found
from hybrid_strategy.cli.arguments import Arguments, parse, parser
from hybrid_strategy.cli.hydra_app import check_first, run_app
from hybrid_strategy.cli.multirun import check_sweep_settings, is_sweep, run_sweep
from hybrid_strategy.cli.plan import show
from hybrid_strategy.config.compose import CONFIG_NAME
from hybrid_strategy.config.here import check_folders, check_here, check_unused
from hybrid_strategy.config.idle import check_counted
from hybrid_strategy.config.messages import quoted
from hybrid_strategy.config.plan import RunPlan, plan_of
from hybrid_strategy.config.resume import find_checkpoint, newest_checkpoint
from hybrid_strategy.config.settings import RunConfig
from hybrid_strategy.config.storage import PLAN_FILE, RESULT_FILE, write_config
from hybrid_strategy.config.text import check_length, check_validation_interval
from hybrid_strategy.errors import ConfigError, HybridError, message
from hybrid_strategy.launch.job import Job, Launcher
from hybrid_strategy.launch.one_run import only_run
from hybrid_strategy.reporting.console import make_console
from hybrid_strategy.reporting.summary import Closing, print_summary
from hybrid_strategy.sweeping.metrics import METRICS_FILE, merge_parts, set_aside

FIT = "hybrid_strategy.cli.fit:run"
_PLAIN = set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-./:")


def run(arguments: Sequence[str]) -> int:
    """The sub-command."""
    made = parser("train", "Trains a model under the layout of the configuration.")
    made.add_argument("--multirun", "-m", action="store_true", help="run every combination of comma-separated values")
    given = parse(made, arguments)
    check_sweep_settings(given)
    if is_sweep(given) and not given.hydra_flags:
        return run_sweep(given, lambda config, run_dir: train(config, run_dir, _of_point(given)), FIT)
    if not given.multirun and not given.hydra_flags:
        check_first(given.source, lambda config: _check_single(config, given.source.overrides))
    elif given.cfg:
        check_first(given.source, lambda config: None)
    return run_app(given, lambda config, run_dir: train(config, run_dir, given))


def _of_point(given: Arguments) -> Arguments:
    """One point of a sweep as a run of its own, for what is printed to go on with it; Hydra knows which one is running."""
    overrides = tuple(str(each) for each in HydraConfig.get().overrides.task)
    return replace(given, source=replace(given.source, overrides=overrides), multirun=False)


def _check(config: RunConfig) -> tuple[RunPlan, Found, Launcher]:
    """Everything that can be refused before a process is started."""
    planned = plan_of(config)
    if planned.world.num_nodes > 1:
        rule = "the local launcher starts the processes of one machine"
        advice = "Set 1, or hydra/launcher=slurm to submit it"
        raise ConfigError(message("cluster.num_nodes", planned.world.num_nodes, rule, "", advice))
    check_here(config, planned.world)
    check_folders(config)
    check_length(config)
    batch = planned.plan.batch
    check_validation_interval(config, batch.global_batch_size // batch.accumulate_grad_batches)
    launcher: Launcher = registry.find("launch.launchers", config.cluster.launcher, "cluster.launcher")
    return planned, find_checkpoint(config), launcher


def _check_single(config: RunConfig, overrides: Sequence[str]) -> None:
    """A point of a sweep may go on in its folder; a single run does so only where it is told to."""
    check_counted(config, _check(config)[0], overrides)
    if config.resume is None and config.paths.run_dir is not None:
        check_unused(Path(config.paths.run_dir))


def train(config: RunConfig, run_dir: Path, given: Arguments) -> None:
    """One run in its folder.

    Raises:
        ConfigError: refused before anything is started.
        WorkerFailedError: a rank failed.
    """
    planned, found, launcher = _check(config)
    config, console = replace(config, strategy=planned.strategy), make_console()
    for name, why in found.skipped:
        console.print(f"skipped {name}: {why}", markup=False, soft_wrap=True)
    if found.path is not None:
        console.print(f"resuming from {found.path}", markup=False, soft_wrap=True)
        config = replace(config, resume=str(found.path))
    elif config.resume is not None:
        console.print(f"nothing to resume for {config.name}: starting anew", markup=False, soft_wrap=True)
        config = replace(config, resume=None)
    with only_run(run_dir):
        write_config(config, run_dir)
        (run_dir / PLAN_FILE).write_text(json.dumps(planned.to_dict(), indent=2), encoding="utf-8")
        show(config, planned, console)
        _launch_or_tell(launcher, planned, run_dir, given)
    result = json.loads((run_dir / RESULT_FILE).read_text(encoding="utf-8"))
    command = resume_command(given, run_dir, _further(config, result)) if newest_checkpoint(run_dir) else ""
    print_summary(Closing(result, str(run_dir), command), console)


def _launch_or_tell(launcher: Launcher, planned: RunPlan, run_dir: Path, given: Arguments) -> None:
    """Runs the ranks; where they end too early and there is a checkpoint, says how to go on."""
    try:
        _launch(launcher, Job(FIT, run_dir, planned.world.devices, environment_of(planned), stops_itself=True))
    except (HybridError, KeyboardInterrupt):
        if newest_checkpoint(run_dir) is not None:
            print(f"run folder: {run_dir}\nresume: {resume_command(given, run_dir)}", file=sys.stderr)
        raise


def _launch(launcher: Launcher, job: Job) -> None:
    """Runs the ranks. Where a run goes on in its own folder the rows that it had logged are kept: the logger would begin anew."""
    if (job.run_dir / METRICS_FILE).is_file():
        set_aside(job.run_dir, keep=True)
    try:
        launcher.run(job)
    finally:
        merge_parts(job.run_dir)


def _further(config: RunConfig, result: Mapping[str, Any]) -> tuple[str, ...]:
    """The overrides that let a finished run go on as far again; resumed with the same limits it would end at once."""
    given = config.trainer
    epochs = given.max_epochs if given.max_epochs is not None and given.max_epochs > 0 else None
    if 0 < given.max_steps <= result["steps"]:
        # Lightning counts an epoch that was cut short by max_steps as done
        return (f"trainer.max_steps={2 * given.max_steps}", *(["trainer.max_epochs=-1"] if epochs else []))
    return (f"trainer.max_epochs={2 * epochs}",) if epochs and epochs <= result["epochs"] else ()


def environment_of(planned: RunPlan) -> dict[str, str]:
    """Variables that the ranks get beside those of their launcher."""
    return {"CUDA_VISIBLE_DEVICES": ""} if planned.world.accelerator == "cpu" else {}


def resume_command(given: Arguments, run_dir: Path, further: Sequence[str] = ()) -> str:
    """The command that goes on with this run, ready to paste into a shell; `further` replace the overrides of their keys."""
    words = ["hybrid", "train"]
    if given.source.config_dir is not None:
        words += ["--config-dir", given.source.config_dir]
    if given.source.config_name != CONFIG_NAME:
        words += ["--config-name", given.source.config_name]
    replaced = {"resume", "paths.run_dir", *(each.partition("=")[0] for each in further)}
    words += [each for each in given.source.overrides if each.partition("=")[0].lstrip("+") not in replaced]
    resume = f"resume={run_dir}" if set(str(run_dir)) <= _PLAIN else quoted(f"resume={run_dir}")
    return " ".join([*map(shlex.quote, words), *further, resume])
