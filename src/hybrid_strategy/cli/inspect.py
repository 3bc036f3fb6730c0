"""`hybrid inspect`: what the strategy sees of a model, and the plan that it has or could have. Starts no other process."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rich.console import Console

from hybrid_strategy.cli.arguments import parse, parser
from hybrid_strategy.cli.hydra_app import run_app
from hybrid_strategy.config.build import build_data, build_module
from hybrid_strategy.config.compose import run_config
from hybrid_strategy.config.here import check_here
from hybrid_strategy.config.plan import plan_of
from hybrid_strategy.config.settings import RunConfig, StrategySettings
from hybrid_strategy.errors import ConfigError
from hybrid_strategy.reporting.console import make_console
from hybrid_strategy.reporting.noise import keep_terminal_clear
from hybrid_strategy.spec.parallel_plan import plan_from

if TYPE_CHECKING:
    from hybrid_strategy.strategy.inspection import Inspection

_LARGEST_RUN = 200_000_000
"""Parameters of a model that is run without being asked for: it takes a few seconds on a CPU."""


def run(arguments: Sequence[str]) -> int:
    """The sub-command."""
    made = parser("inspect", "Shows the parts of a model, its units and tensor-parallel rules, and what is not understood.")
    made.add_argument("--json", action="store_true", help="the answer as JSON")
    made.add_argument("--run", action="store_true", help=f"run one batch of a model of more than {_LARGEST_RUN:,} parameters too")
    given = parse(made, arguments)
    config = run_config(given.source)
    if given.hydra_flags:
        return run_app(given, lambda config, run_dir: None)
    found = look(config, always_run="--run" in arguments)
    if given.json:
        print(json.dumps(found.to_dict(), indent=2))
    else:
        show(found, make_console())
    return 0


def look(config: RunConfig, always_run: bool = False) -> Inspection:
    """Builds the model of the configuration as one process has it, and looks at it."""
    own = config.strategy
    cluster = replace(config.cluster, devices="auto")
    config = replace(
        config,
        strategy=StrategySettings(module=own.module, parallel_plan=own.parallel_plan),
        cluster=cluster,
        precision=replace(config.precision, mode="32-true"),
        trainer=replace(config.trainer, accelerator="cpu"),
    )
    planned = plan_of(config)
    check_here(config, planned.world)
    from hybrid_strategy.strategy.inspection import inspect

    module = build_module(config, planned)
    module.configure_model()
    plan = plan_from(own.parallel_plan) if own.parallel_plan is not None else None
    if not always_run and sum(each.numel() for each in module.parameters()) > _LARGEST_RUN:
        return inspect(module, own.module, plan)
    return _run_one_batch(config, module, build_data(config, planned), plan)


def _run_one_batch(config: RunConfig, module: Any, data: Any, plan: Any) -> Inspection:
    import lightning.pytorch as pl
    from lightning.fabric.utilities.exceptions import MisconfigurationException

    from hybrid_strategy.strategy.hybrid import HybridParallelStrategy
    from hybrid_strategy.strategy.inspection import Inspector

    keep_terminal_clear(logged=False)
    pl.seed_everything(config.seed, verbose=False)
    inspector = Inspector(config.strategy.module, plan)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=HybridParallelStrategy(module=config.strategy.module, parallel_plan=plan),
        callbacks=[inspector],
        max_steps=1,
        limit_train_batches=1,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    try:
        trainer.fit(module, datamodule=data)
    except MisconfigurationException as error:
        raise ConfigError(str(error)) from error
    assert inspector.found is not None  # one batch was run
    return inspector.found


def show(found: Inspection, console: Console) -> None:
    """Prints the answer."""

    def say(text: str = "") -> None:
        console.print(text, markup=False, soft_wrap=True)

    say(f"module: {found.module}")
    width = max((len(each.name) for each in found.parts), default=0) + 2
    for part in found.parts:
        times = f" x {part.count}" if part.count > 1 else ""
        depth = "  " * part.name.count(".")
        say(f"  {depth}{part.name:<{width - len(depth) + 2}}{part.parameters:>14,}  {part.kind}{times}")
    say(f"\nunits ({found.plan_from}, in the order of forward):")
    say(f"  {', '.join(found.units) or 'none: a pipeline has nothing to cut'}")
    if found.carried:
        say(f"\ncarried past cuts of a pipeline:\n  {', '.join(found.carried)}")
    say(f"\ntensor-parallel rules ({found.plan_from}):")
    for pattern, style in found.rules.items():
        say(f"  {pattern:<{width}}{style}")
    if found.plan_from == "proposed":
        say(f"\nthe plan to write, after a look at every word:\n{plan_text(found)}")
    for title, names in (
        ("held whole by every tensor-parallel rank", found.plain),
        ("in no unit, so held by every pipeline stage", found.outside),
        ("tied", [" = ".join(each) for each in found.tied]),
        ("trainable, but without a gradient" if found.was_run else "unused: not known, no batch was run", found.unused),
        ("frozen", found.frozen),
        ("not understood", found.not_understood),
    ):
        say(f"\n{title}: {'' if names else 'nothing'}")
        for name in names:
            say(f"  {name}")


def plan_text(found: Inspection) -> str:
    """The plan as Python."""
    rules = "".join(f"                {pattern!r}: {style!r},\n" for pattern, style in found.rules.items())
    tensor = f"            tensor={{\n{rules}            }},\n" if rules else ""
    units = f"            units={tuple(found.units)!r},\n"
    units += f"            carried={tuple(found.carried)!r},\n" if found.carried else ""
    return f"    def parallel_plan(self):\n        return ParallelPlan(\n{units}{tensor}        )"
