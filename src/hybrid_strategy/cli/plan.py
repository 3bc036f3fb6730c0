"""`hybrid plan`: what `hybrid train` would run with the same overrides, and what would be better. Without torch."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from hybrid_strategy.cli.arguments import Arguments, parse, parser
from hybrid_strategy.cli.hydra_app import run_app
from hybrid_strategy.config.compose import run_config
from hybrid_strategy.config.forecasting import doubt_of, forecast_of
from hybrid_strategy.config.idle import check_counted
from hybrid_strategy.config.plan import RunPlan, by_full_key, plan_of
from hybrid_strategy.config.question import batch_note, fixed_of, nothing_possible, question_of, why_not
from hybrid_strategy.config.settings import RunConfig
from hybrid_strategy.config.targets import global_batch_size_of, shape_of
from hybrid_strategy.config.world import world_of
from hybrid_strategy.errors import ConfigError, LayoutError, ModelError, NoLayoutFitsError, message
from hybrid_strategy.planning.forecast import Forecast
from hybrid_strategy.planning.report import PlanReport, ReportOptions, plan_report, relief_rows
from hybrid_strategy.planning.search import Question, search
from hybrid_strategy.reporting.console import make_console
from hybrid_strategy.reporting.plan_report import EXPLAINED, print_explained, print_ladder, print_reliefs, print_report
from hybrid_strategy.reporting.plan_table import print_plan
from hybrid_strategy.spec.model_shape import ModelShape
from hybrid_strategy.units import format_bytes, format_seconds

_KEEP = ("strategy.", "strategy=", "cluster.devices")
"""Overrides that the commands of a ladder replace."""

_FEW = 16
"""A run of more processes whose layout nobody has set is only a row beside the better ones."""


@dataclass(frozen=True)
class Answer:
    """What was found.

    Attributes:
        planned: the run as configured; None where it would be refused.
        configured: its forecast.
        report: of the search; None where nothing can be forecast.
        note: why a part is missing.
    """

    planned: RunPlan | None
    configured: Forecast | None
    report: PlanReport | None
    note: str = ""

    def to_dict(self) -> dict[str, Any]:
        """For `--json`: the plan of the run, and the report beside it."""
        found = self.planned.to_dict() if self.planned else {}
        report = {**self.report.values, "title": self.report.title, "job": dict(self.report.job)} if self.report else None
        return {**found, "forecast": self.configured.to_dict() if self.configured else None, "search": report, "note": self.note}


def run(arguments: Sequence[str]) -> int:
    """The sub-command."""
    given, flags = _parsed(arguments)
    config = run_config(given.source)
    if given.hydra_flags:
        return run_app(given, lambda config, run_dir: None)
    if flags.dry_run:
        from hybrid_strategy.cli.dry_run import run_dry

        return run_dry(config, flags.ranks, given.json)
    _check_flags(flags)
    asked = ReportOptions(count=flags.top, shown=flags.of, command=" ".join(["hybrid train", *_kept(given.source.overrides)]))
    try:
        found = answer(config, given.source.overrides, asked)
    except NothingFitsError as error:
        return _tell_reliefs(error, given.json)
    if given.json:
        print(json.dumps(found.to_dict(), indent=2))
    else:
        _print(config, found, flags, make_console())
    return 0


def _parsed(arguments: Sequence[str]) -> tuple[Arguments, argparse.Namespace]:
    made = parser("plan", "Shows which layouts are best for a run and what `hybrid train` would do; starts nothing.")
    made.add_argument("--json", action="store_true", help="everything as JSON")
    made.add_argument("--top", type=int, default=8, metavar="N", help="so many of the best layouts (8)")
    made.add_argument("--explain", choices=EXPLAINED, metavar="WHAT", help=f"every line of {', '.join(EXPLAINED)}")
    made.add_argument("--of", type=int, default=1, metavar="N", help="explain the N-th best layout (1); 0: as configured")
    made.add_argument("--dry-run", action="store_true", help="play a step with the real code and fake tensors, and count it")
    made.add_argument("--ranks", default="", metavar="R,R", help="with --dry-run: as these ranks (first, middle and last stage)")
    made.add_argument("--ladder", action="store_true", help="the order in which to bring the run up, as commands")
    flags = made.parse(arguments)
    if flags.dry_run + flags.ladder + (flags.explain is not None) > 1:
        made.error("--dry-run, --ladder and --explain are three answers: leave two out")
    return parse(made, arguments), flags


def _check_flags(flags: argparse.Namespace) -> None:
    """Refuses flags that say nothing, or would be ignored."""
    for name, least in (("top", 1), ("of", 0)):
        number = getattr(flags, name)
        if number < least:
            raise ConfigError(message(f"--{name}", number, f"it must be {least} or more", "", f"Set {least} or more"))
    if flags.ranks:
        rule = "only a dry run plays as them, so it would be ignored"
        raise ConfigError(message("--ranks", flags.ranks, rule, "", "Add --dry-run"))


def _kept(overrides: Sequence[str]) -> list[str]:
    return [each for each in overrides if not each.lstrip("+").startswith(_KEEP)]


class NothingFitsError(NoLayoutFitsError):
    """With what was asked, so that the cheapest changes can be found."""

    def __init__(self, text: str, question: Question) -> None:
        super().__init__(text)
        self.question = question


def answer(config: RunConfig, overrides: Sequence[str] = (), asked: ReportOptions | None = None) -> Answer:
    """The plan of the run, its forecast, and the search for better ones under what the user has fixed.

    Raises:
        ConfigError: the configuration is wrong.
        NothingFitsError: no layout fits.
    """
    fixed, (own, told) = fixed_of(config, overrides), _own(config)
    reason = why_not(config, own)
    planned, refusal = None, ""
    try:
        planned, refusal = _as_it_stands(config, overrides, alone=bool(reason))
    except NoLayoutFitsError as error:
        raise NothingFitsError(str(error), question_of(config, world_of(config), fixed, own)) from error
    except (LayoutError, ModelError) as error:
        foreign = isinstance(error, ModelError) and config.model.get("config")  # of Hugging Face: planned, not trained
        if reason or not (foreign or (isinstance(error, LayoutError) and not fixed)):
            raise
        refusal = str(error)
    if reason:
        return Answer(planned, None, None, f"no forecast: {told or reason}")
    configured = forecast_of(config, planned) if planned else None
    question = question_of(config, planned.world if planned else world_of(config), fixed, own)
    result = search(question)
    if not result.forecasts and not result.misfits:
        raise nothing_possible(question)
    if not result.forecasts:
        try:
            _ = result.winner
        except NoLayoutFitsError as error:
            raise NothingFitsError(by_full_key(str(error)), question) from error
    options = asked or ReportOptions()
    if options.shown > len(result.forecasts):
        rule, numbers = "there is no such row", f"{len(result.forecasts)} layouts fit"
        raise ConfigError(message("--of", options.shown, rule, numbers, f"Set 0 to {len(result.forecasts)}"))
    report = plan_report(result, ReportOptions(configured, options.count, options.shown, options.max_nodes, options.command))
    refused = f"hybrid train refuses this as it stands: {refusal}" if refusal else ""
    return Answer(planned, configured, report, "; ".join(each for each in (refused, told, batch_note(config)) if each))


def _as_it_stands(config: RunConfig, overrides: Sequence[str], alone: bool) -> tuple[RunPlan | None, str]:
    """The run, or why `hybrid train` refuses it though its layout is right: what limits a search may do nothing for it.

    Args:
        alone: nothing is searched.
    """
    planned = plan_of(config)
    limits = [] if alone else [each for each in overrides if each.lstrip("+").startswith("strategy.")]
    check_counted(config, planned, [each for each in overrides if each not in limits])
    try:
        check_counted(config, planned, limits)
    except ConfigError as error:
        return None, str(error)
    return planned, ""


def _own(config: RunConfig) -> tuple[ModelShape | None, str]:
    """The shape of a model of the user's own, and how it is known; torch is imported only then."""
    if shape_of(config) is not None or global_batch_size_of(config, 1) is None:
        return None, ""
    from hybrid_strategy.config.own_model import own_shape

    return own_shape(config)


def show(config: RunConfig, planned: RunPlan, console: Console) -> None:
    """Prints the plan table."""
    world = planned.world
    kind = "CPU" if world.accelerator == "cpu" else "GPU"
    where = f"{world.devices} on the {kind} of this machine"
    if kind == "GPU":
        where = f"{world.devices} GPUs" if world.num_nodes == 1 else f"{world.num_nodes} nodes x {world.devices} GPUs"
    facts = {"processes": f"{where}; {world.note}" if world.note else where, "precision": config.precision.mode}
    found = forecast_of(config, planned)
    if found is not None:
        speed = found.tokens_per_second_per_gpu * world.size
        memory = format_bytes(found.ledger.total_bytes)
        facts["forecast"] = f"{format_seconds(found.step_seconds)} a step, {speed:,.0f} tokens/s, {memory} on the fullest rank"
        doubt = doubt_of(config, planned)
        facts["forecast"] += f"; {doubt}" if doubt else ""
    staged = planned.plan.extra.get("checkpoint_staging_bytes")
    if staged is not None:
        facts["checkpoints"] = f"written in the background from a copy, {format_bytes(staged)} of host memory on each rank"
    print_plan(planned.plan, facts, console)


def _print(config: RunConfig, found: Answer, flags: argparse.Namespace, console: Console) -> None:
    if found.report is not None and flags.explain:
        print_explained(found.report, flags.explain, console)
    elif found.report is not None and flags.ladder:
        print_ladder(found.report, console)
    else:
        if found.planned is not None and (found.report is None or fixed_of(config) or found.planned.world.size <= _FEW):
            show(config, found.planned, console)
        if found.report is not None:
            print_report(found.report, console)
    if found.note:
        console.print(found.note, markup=False, soft_wrap=True)


def _tell_reliefs(error: NothingFitsError, as_json: bool) -> int:
    rows = relief_rows(error.question)
    if as_json:
        print(json.dumps({"fits": False, "error": str(error), "changes": rows}, indent=2))
    print(error, file=sys.stderr)
    if not as_json:
        print_reliefs(rows, make_console())
    return error.exit_code
