"""`hybrid doctor`: measures this machine, so that forecasts are of it and not of a guess."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from hybrid_strategy.cli.calibrate import show
from hybrid_strategy.cli.train import FIT, environment_of
from hybrid_strategy.config.compose import Source, run_config
from hybrid_strategy.config.machine import LOCAL, Machine, machine_file, num_cores, this_machine, write_machine
from hybrid_strategy.config.measured import MeasuredRun, measured_run, refitted
from hybrid_strategy.config.plan import plan_of
from hybrid_strategy.config.storage import write_config
from hybrid_strategy.config.world import World, visible_gpus
from hybrid_strategy.files import read_json
from hybrid_strategy.launch.job import Job
from hybrid_strategy.launch.launchers.local import LocalLauncher
from hybrid_strategy.measure.machine import gpu, processor
from hybrid_strategy.measure.worker import RATES_FILE
from hybrid_strategy.planning.calibrate import coefficients
from hybrid_strategy.reporting.console import make_console

MEASURE = "hybrid_strategy.measure.worker:run"
STEPS = 24

_TEXT = ("data.max_bytes=400000", "data.validation_fraction=0.1", "model.vocab_size=1024")
_QUIET = (
    "callbacks=none",
    "logger=none",
    "trainer.num_sanity_val_steps=0",
    "trainer.limit_val_batches=0",
    "trainer.enable_progress_bar=false",
    "trainer.enable_model_summary=false",
)
_WIDE = ("model.hidden_size=256", "model.num_layers=4", "model.num_attention_heads=4", "model.num_key_value_heads=2")
_DEEP = ("model.hidden_size=96", "model.num_layers=8", "model.num_attention_heads=4", "model.num_key_value_heads=2")
_MODELS = {
    "wide": (*_WIDE, "model.intermediate_size=704", "model.sequence_length=128", "data.global_batch_size=16"),
    "deep": (*_DEEP, "model.intermediate_size=256", "model.sequence_length=64", "data.global_batch_size=32"),
}
RUNS = (("wide", "single"), ("deep", "single"), ("wide", "dp2"), ("deep", "tp2"), ("wide", "pp2"), ("deep", "dp2_zero1"))
"""Reference runs: model and layout. Small, so that all together take about a minute on two cores."""


def run(arguments: Sequence[str]) -> int:
    """The sub-command."""
    made = argparse.ArgumentParser(
        prog="hybrid doctor",
        usage="hybrid doctor [--kernels] [--cpu] [--json]",
        description="Measures this machine: kernels, links, a few steps of reference runs. Forecasts of cluster=local use it.",
    )
    made.add_argument("--kernels", action="store_true", help="kernels and links only, without reference runs")
    made.add_argument("--cpu", action="store_true", help="the processor, though there are GPUs")
    made.add_argument("--json", action="store_true", help="the result as JSON")
    given = made.parse_args(arguments)
    gpus = 0 if given.cpu else visible_gpus()
    accelerator = "cuda" if gpus else "cpu"
    path = machine_file(None, accelerator)
    with tempfile.TemporaryDirectory(prefix="hybrid-doctor-") as folder:
        machine = _measured(Path(folder), gpus)
        write_machine(path, machine)
        runs = [] if given.kernels else _reference_runs(Path(folder), accelerator, gpus)
        before, machine = machine, refitted(machine, runs) if runs else machine
        write_machine(path, machine)
        if given.json:
            print(
                json.dumps({"file": str(path), "cores": machine.cores, "coefficients": coefficients(machine.cluster)}, indent=2)
            )
        else:
            show(before, machine, runs, make_console())
            make_console().print(f"written to {path}", markup=False, soft_wrap=True)
    return 0


def _measured(folder: Path, gpus: int) -> Machine:
    """Kernels and links, with all GPUs or all cores at work; of a processor also one process on all cores."""
    cores = num_cores()
    print(f"measuring kernels and links on {f'{gpus} GPUs' if gpus else f'{cores} cores'}", file=sys.stderr)
    world = World(1, gpus or 1, "cuda" if gpus else "cpu")
    base = replace(this_machine("/nowhere", world), name=LOCAL)
    loaded = _rates(folder / "loaded", gpus or cores, {} if gpus else {"CUDA_VISIBLE_DEVICES": ""})
    if gpus:
        return Machine(gpu(base, loaded))
    alone = _rates(folder / "alone", 1, {"CUDA_VISIBLE_DEVICES": ""}) if cores > 1 else loaded
    names = {"peak_flops": "half_flops", "peak_fp32_flops": "fp32_flops", "memory_bytes_per_second": "stream_bytes"}
    faster = {field: alone[name] / loaded[name] for field, name in names.items()}
    return Machine(processor(base, loaded), float(cores), faster)


def _rates(folder: Path, processes: int, environment: Mapping[str, str]) -> dict[str, float]:
    folder.mkdir()
    LocalLauncher().run(Job(MEASURE, folder, processes, environment))
    return read_json(folder / RATES_FILE) or {}


def _reference_runs(folder: Path, accelerator: str, gpus: int) -> list[MeasuredRun]:
    most, found = gpus or num_cores(), []
    for model, strategy in RUNS:
        if strategy != "single" and most < 2:
            continue
        print(f"reference run: {model} {strategy}", file=sys.stderr)
        found.append(_reference_run(folder / f"{model}_{strategy}", model, strategy, accelerator))
    return found


def _reference_run(folder: Path, model: str, strategy: str, accelerator: str) -> MeasuredRun:
    trainer = "cpu" if accelerator == "cpu" else "gpu"
    overrides = (f"name={model}", f"strategy={strategy}", f"trainer={trainer}", *_MODELS[model], *_TEXT)
    return measure(folder, (*overrides, f"trainer.max_steps={STEPS}"))


def measure(folder: Path, overrides: Sequence[str]) -> MeasuredRun:
    """A short run of `hybrid train` with these overrides, without callbacks, loggers and checkpoints, measured."""
    quiet = (*_QUIET, "trainer.enable_checkpointing=false", f"paths.run_dir={folder}")
    config = run_config(Source((*overrides, *quiet)))
    planned = plan_of(config)
    folder.mkdir()
    write_config(config, folder)
    LocalLauncher().run(Job(FIT, folder, planned.world.devices, environment_of(planned)))
    return measured_run(folder)
