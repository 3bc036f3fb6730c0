"""`hybrid profile layers`: measures every unit of the model, and cuts its stages by what was measured."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table

from hybrid_strategy.cli.arguments import parse, parser
from hybrid_strategy.cli.hydra_app import run_app
from hybrid_strategy.config.build import build_module
from hybrid_strategy.config.compose import run_config
from hybrid_strategy.config.plan import RunPlan, plan_of
from hybrid_strategy.config.settings import RunConfig
from hybrid_strategy.config.targets import shape_of
from hybrid_strategy.errors import ConfigError, message
from hybrid_strategy.planning.balance import parameter_costs
from hybrid_strategy.planning.cuts import Cut, cut_by, moves
from hybrid_strategy.planning.layouts import find_schedule
from hybrid_strategy.planning.parameters import decoder_units
from hybrid_strategy.reporting.console import make_console
from hybrid_strategy.units import format_seconds

if TYPE_CHECKING:
    from hybrid_strategy.spec.model_shape import ModelShape


def run(arguments: Sequence[str]) -> int:
    """The sub-command."""
    made = parser("profile layers", "Measures the model's units one by one and cuts its stages by what was measured.")
    made.usage = "hybrid profile layers [flags] [key=value ...]"
    made.add_argument("--json", action="store_true", help="everything as JSON")
    words = list(arguments)
    if not {"-h", "--help"} & set(words):
        if "layers" not in words:
            raise ConfigError(
                message("profile", " ".join(words[:1]), "there is one thing to profile", "", "Set: hybrid profile layers")
            )
        words.remove("layers")
    given = parse(made, words)
    config = run_config(given.source)
    if given.hydra_flags:
        return run_app(given, lambda config, run_dir: None)
    planned = plan_of(config)
    shape = shape_of(config)
    if shape is None:
        rule, advice = "profiling needs a language model of ours", "Set a model of the group model"
        raise ConfigError(message("model._target_", config.model.get("_target_"), rule, "", advice))
    seconds = _measured(config, planned, shape)
    cuts = _cuts(planned, shape, seconds)
    if given.json:
        print(json.dumps({"seconds": seconds, "cuts": [vars(each) for each in cuts]}, indent=2))
    else:
        _show(seconds, cuts)
    return 0


def _measured(config: RunConfig, planned: RunPlan, shape: ModelShape) -> dict[str, float]:
    """Seconds of each unit over one micro-batch, on the first GPU or the CPU of this machine."""
    import torch

    from hybrid_strategy.measure.layers import unit_seconds

    device = torch.device("cuda" if planned.world.accelerator != "cpu" and torch.cuda.is_available() else "cpu")
    torch.set_num_threads(1)
    module: Any = build_module(config, planned)
    module.configure_model()
    model = module.model.to(device)
    rows = planned.plan.batch.micro_batch_size(planned.plan.layout.data_parallel_size)
    tokens = torch.zeros(rows, shape.sequence_length, dtype=torch.int64, device=device)
    return unit_seconds(model, model.parallel_plan().units, lambda: model(tokens), device)


def _cuts(planned: RunPlan, shape: ModelShape, seconds: dict[str, float]) -> list[Cut]:
    layout, batch = planned.plan.layout, planned.plan.batch
    if layout.num_stages == 1:
        return []
    table = find_schedule(layout.schedule).build(layout.pipeline_parallel_size, layout.stages_per_rank, batch.num_microbatches)
    units = decoder_units(shape)
    counted = parameter_costs([unit.num_parameters for unit in units], [unit.embedding for unit in units])
    return cut_by([unit.name for unit in units], counted, [seconds[unit.name] for unit in units], table)


def _show(seconds: dict[str, float], cuts: Sequence[Cut]) -> None:
    console, total = make_console(), sum(seconds.values())
    table = Table(box=box.SIMPLE, pad_edge=False)
    for name in ("unit", "forward and backward", "share"):
        table.add_column(name, justify="left" if name == "unit" else "right")
    for name, value in seconds.items():
        table.add_row(name, format_seconds(value), f"{value / total:.1%}")
    console.print(table)
    if not cuts:
        console.print("one stage: nothing is cut", markup=False)
        return
    counted, best = cuts[1], min(cuts[1:], key=lambda each: each.step_seconds)
    for each in cuts:
        words = f"{each.name:<9} strategy.stage_cuts={list(each.stage_cuts)}".replace(", ", ",")
        console.print(f"{words}  schedule takes {format_seconds(each.step_seconds)}", markup=False)
    change = best.step_seconds / counted.step_seconds - 1
    for line in moves(list(seconds), counted.stage_cuts, best.stage_cuts):
        console.print(f"  {line}", markup=False)
    console.print(f"the measured cut instead of the counted one: step {change:+.0%}".replace("%", " %"), markup=False)
