"""`hybrid plan --dry-run`: the real model in the real code as ranks of the real world, beside the arithmetic."""

from __future__ import annotations

import json
import time
from dataclasses import asdict

from rich import box
from rich.table import Table

from hybrid_strategy.config.forecasting import scenario_of
from hybrid_strategy.config.plan import plan_of
from hybrid_strategy.config.settings import RunConfig
from hybrid_strategy.errors import ConfigError, message
from hybrid_strategy.reporting.console import make_console
from hybrid_strategy.spec.layout import Layout
from hybrid_strategy.units import format_bytes


def run_dry(config: RunConfig, ranks: str, as_json: bool) -> int:
    """Plays and prints.

    Raises:
        ConfigError: the configuration cannot be run, or nothing is known of its model.
    """
    planned = plan_of(config)
    scenario = scenario_of(config, planned)
    if scenario is None:
        rule, advice = "a dry run needs a language model of ours", "Set a model of the group model, and data=text"
        raise ConfigError(message("model._target_", config.model.get("_target_"), rule, "", advice))
    if scenario.layout.compile:
        rule = "a dry run counts operations one by one, and compiled code does not show them"
        raise ConfigError(message("strategy.compile", True, rule, "", "Set false"))
    chosen = _ranks(ranks, planned.plan.layout)
    started = time.monotonic()
    from hybrid_strategy.measure.beside import compare_ranks

    cuts = planned.strategy.stage_cuts
    found = compare_ranks(scenario, config.precision.mode, config.optimizer, chosen, cuts)
    seconds = time.monotonic() - started
    if as_json:
        print(json.dumps({"seconds": seconds, "ranks": [asdict(each) for each in found]}, indent=2))
        return 0
    console = make_console()
    for each in found:
        table = Table(box=box.SIMPLE, pad_edge=False, title=f"rank {each.rank} of {planned.world.size}", title_justify="left")
        for name in ("", "counted", "forecast", "error"):
            table.add_column(name, justify="left" if not name else "right")
        for line in (*each.memory, *each.sent):
            sizes = format_bytes(line.counted), format_bytes(line.forecast)
            table.add_row(line.what, *sizes, f"{line.error:+.1%}" if line.error else "equal")
        console.print(table)
    console.print(f"{len(found)} ranks of {planned.plan.layout.name} in {seconds:.1f} s", markup=False)
    return 0


def _ranks(given: str, layout: Layout) -> list[int]:
    """The ranks asked for, by default the first of the first, the second, a middle and the last pipeline rank."""
    size = layout.pipeline_parallel_size
    if not given:
        columns = layout.world_size // size
        return [stage * columns for stage in sorted({0, min(1, size - 1), size // 2, size - 1})]
    try:
        ranks = [int(each) for each in given.split(",")]
    except ValueError:
        ranks = [-1]
    if any(not 0 <= rank < layout.world_size for rank in ranks):
        rule = f"ranks are whole numbers from 0 to {layout.world_size - 1}"
        raise ConfigError(message("--ranks", given, rule, "", "Set e.g. --ranks 0,1"))
    return ranks
