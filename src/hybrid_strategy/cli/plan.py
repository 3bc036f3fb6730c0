"""`hybrid plan`: what `hybrid train` would run with the same overrides. Starts nothing, imports no torch."""

from __future__ import annotations

import json
from collections.abc import Sequence

from rich.console import Console

from hybrid_strategy.cli.arguments import parse, parser
from hybrid_strategy.cli.hydra_app import run_app
from hybrid_strategy.config.compose import run_config
from hybrid_strategy.config.plan import RunPlan, plan_of
from hybrid_strategy.config.settings import RunConfig
from hybrid_strategy.reporting.console import make_console
from hybrid_strategy.reporting.plan_table import print_plan
from hybrid_strategy.units import format_bytes


def run(arguments: Sequence[str]) -> int:
    """The sub-command."""
    made = parser("plan", "Shows what `hybrid train` would run with the same overrides, and starts nothing.")
    made.add_argument("--json", action="store_true", help="the plan as JSON")
    given = parse(made, arguments)
    config = run_config(given.source)
    if given.hydra_flags:
        return run_app(given, lambda config, run_dir: None)
    planned = plan_of(config)
    if given.json:
        print(json.dumps(planned.to_dict(), indent=2))
    else:
        show(config, planned, make_console())
    return 0


def show(config: RunConfig, planned: RunPlan, console: Console) -> None:
    """Prints the plan table."""
    world = planned.world
    kind = "CPU" if world.accelerator == "cpu" else "GPU"
    where = f"{world.devices} on the {kind} of this machine"
    if kind == "GPU":
        where = f"{world.devices} GPUs" if world.num_nodes == 1 else f"{world.num_nodes} nodes x {world.devices} GPUs"
    facts = {"processes": f"{where}; {world.note}" if world.note else where, "precision": config.precision.mode}
    staged = planned.plan.extra.get("checkpoint_staging_bytes")
    if staged is not None:
        facts["checkpoints"] = f"written in the background from a copy, {format_bytes(staged)} of host memory on each rank"
    print_plan(planned.plan, facts, console)
