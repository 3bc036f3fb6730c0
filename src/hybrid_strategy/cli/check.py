"""`hybrid check`: do the layout of the configuration and one process give the same numbers? Exit code 0 same, 1 different."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from hybrid_strategy.cli.arguments import Arguments, parse, parser
from hybrid_strategy.cli.hydra_app import run_app
from hybrid_strategy.config.build import build_data, build_module
from hybrid_strategy.config.compose import run_config
from hybrid_strategy.config.here import check_here
from hybrid_strategy.config.idle import check_counted
from hybrid_strategy.config.messages import Shown
from hybrid_strategy.config.plan import RunPlan, plan_of
from hybrid_strategy.config.settings import RunConfig, StrategySettings
from hybrid_strategy.config.text import check_length
from hybrid_strategy.errors import ConfigError, did_you_mean, message
from hybrid_strategy.reporting.console import make_console

if TYPE_CHECKING:
    from hybrid_strategy.parity.report import ParityReport

_PREFIX = "check."
_DEFAULTS: dict[str, int | float] = {"steps": 3, "timeout_seconds": 600.0}
_TRAINER = (
    "max_epochs",
    "max_steps",
    "limit_train_batches",
    "overfit_batches",
    "accumulate_grad_batches",
    "gradient_clip_val",
    "gradient_clip_algorithm",
    "deterministic",
    "benchmark",
    "detect_anomaly",
)
"""What of the Trainer's settings bears on the numbers of the first steps."""


def run(arguments: Sequence[str]) -> int:
    """The sub-command."""
    what = "Compares the numbers of the configured layout with those of one process: weights, loss, every gradient, every step."
    made = parser("check", what)
    made.usage = "hybrid check [flags] [check.steps=3] [check.timeout_seconds=600] [key=value ...]"
    made.add_argument("--json", action="store_true", help="the report as JSON")
    given = parse(made, arguments)
    settings, given = _split(given)
    config = run_config(given.source)
    if given.hydra_flags:
        return run_app(given, lambda config, run_dir: None)
    check_counted(config, plan_of(config), given.source.overrides)
    report = check(config, settings)
    if given.json:
        print(json.dumps(report.to_dict(), indent=2))
    else:
        from hybrid_strategy.parity.table import print_report

        print_report(report, make_console())
    return 0 if report.same else 1


def check(config: RunConfig, settings: dict[str, int | float]) -> ParityReport:
    """Runs the check of a configuration.

    Raises:
        ConfigError: the configuration cannot be honoured; nothing was started, or a rank refused it.
        WorkerFailedError: a rank failed.
    """
    planned = plan_of(config)
    _refuse(config, planned)
    check_here(config, planned.world)
    check_length(config)
    from hybrid_strategy.parity.check import run_check
    from hybrid_strategy.parity.request import ParityOptions, make_request

    options = ParityOptions(
        trainer=_trainer(config),
        seed=config.seed,
        accelerator=planned.world.accelerator,
        timeout_seconds=float(settings["timeout_seconds"]),
        float32_matmul=config.precision.float32_matmul,
    )
    module, data = partial(build_module, config, planned), partial(build_data, config, planned)
    request = make_request(module, data, _strategy(config, planned), int(settings["steps"]), planned.world.size, options)
    print(f"running one process, then {request.world_size}: {request.steps} steps of {planned.plan.layout.name}", file=sys.stderr)
    return run_check(request)


def _split(given: Arguments) -> tuple[dict[str, int | float], Arguments]:
    """The check's own settings, and the arguments without them."""
    own = [each for each in given.source.overrides if each.startswith(_PREFIX)]
    kept = tuple(each for each in given.source.overrides if not each.startswith(_PREFIX))
    settings = dict(_DEFAULTS)
    for each in own:
        name, _, value = each.removeprefix(_PREFIX).partition("=")
        settings[name] = _number(name, value)
    return settings, replace(given, source=replace(given.source, overrides=kept))


def _number(name: str, value: str) -> int | float:
    if name not in _DEFAULTS:
        raise ConfigError(message(f"check.{name}", Shown(value), "there is no such key", "", did_you_mean(name, _DEFAULTS)))
    kind = type(_DEFAULTS[name])
    try:
        number = kind(value)
    except ValueError:
        number = kind(0)
    if not 0 < number < float("inf"):
        wanted = "a whole number of 1 or more" if kind is int else "a number above 0"
        raise ConfigError(message(f"check.{name}", Shown(value), f"it must be {wanted}", "", f"Set {_DEFAULTS[name]:g}"))
    return number


def _refuse(config: RunConfig, planned: RunPlan) -> None:
    """What `hybrid train` could do and a check cannot."""
    if planned.world.num_nodes > 1:
        rule = "a check runs on the processes of one machine"
        raise ConfigError(message("cluster.num_nodes", planned.world.num_nodes, rule, "", "Set 1 and smaller sizes"))
    if config.resume is not None:
        rule = "a check compares from the first values on"
        raise ConfigError(message("resume", config.resume, rule, "", "Leave it out"))


def _strategy(config: RunConfig, planned: RunPlan) -> dict[str, Any]:
    arguments = {each.name: getattr(planned.strategy, each.name) for each in fields(StrategySettings) if each.name != "_target_"}
    return arguments | {"seed": config.seed if config.strategy.seed is None else config.strategy.seed}


def _trainer(config: RunConfig) -> dict[str, Any]:
    given = {name: getattr(config.trainer, name) for name in _TRAINER}
    return {name: value for name, value in given.items() if value is not None} | {"precision": config.precision.mode}
