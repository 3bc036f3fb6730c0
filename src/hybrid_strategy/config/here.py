"""What a run needs of this machine and folder, as far as it can be seen without importing torch or anything of the user's."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

from hybrid_strategy.config.named_target import check_targets
from hybrid_strategy.config.settings import RunConfig
from hybrid_strategy.config.targets import LANGUAGE_MODEL, TEXT_DATA, MlflowSettings, TensorBoardSettings
from hybrid_strategy.config.world import World, visible_gpus
from hybrid_strategy.data.corpus import check_split, find_corpus
from hybrid_strategy.errors import ConfigError, message

_RESULTS = ("metrics.csv", "status.json", "result.json")
_TRIAL_BYTES = 256 * 1024
"""A run folder takes more than that before the first step."""

_PACKAGES = {
    TensorBoardSettings._target_: ("tensorboard", "tensorboardX"),
    MlflowSettings._target_: ("mlflow",),
    "lightning.pytorch.loggers.MLFlowLogger": ("mlflow",),
    "lightning.pytorch.loggers.CometLogger": ("comet_ml",),
    "lightning.pytorch.loggers.NeptuneLogger": ("neptune",),
}
"""Loggers that need a package, or one of several. W&B is not among them: a run goes on without it."""

_FEWEST, _PER_CORE = 64, 8
"""So many processes may be started on any machine, and so many for every core: a rank without work holds 0.3 GB of memory."""


def check_here(config: RunConfig, world: World) -> None:
    """Refuses what every rank would refuse, or what would end this machine, before any is started.

    Raises:
        ConfigError: a class, package or file that is not there, a backend or a number of processes that this machine cannot have.
    """
    check_present(config, world)
    if wrong := too_many(world) or too_few_gpus(world):
        raise ConfigError(wrong)


def check_present(config: RunConfig, world: World) -> None:
    """Refuses what every rank would refuse, wherever it runs with the files and packages that are here.

    Raises:
        ConfigError: a class, package or file that is not there, a backend that the ranks cannot have.
    """
    check_targets(config)
    _check_packages(config.logger)
    _check_module(config)
    _check_weights(config.strategy.initial_weights)
    _check_backend(config.strategy.process_group_backend, world.accelerator)
    if config.data.get("_target_") == TEXT_DATA:
        _check_text(config.data["files"], config.data["max_bytes"])


def check_folders(config: RunConfig) -> None:
    """That the run folder and the cache can be made; nothing is left behind.

    Raises:
        ConfigError: one of them cannot.
    """
    _check_folder("paths.output_dir", config.paths.output_dir)
    for key, given in (("paths.run_dir", config.paths.run_dir), ("paths.cache_dir", config.paths.cache_dir)):
        if given is not None:
            _check_folder(key, given)


def check_unused(run_dir: Path) -> None:
    """That no other run has left its results there.

    Raises:
        ConfigError: it has; its metrics would be lost, and its checkpoints taken for those of the new run.
    """
    left = next((each for each in _RESULTS if (run_dir / each).is_file()), None)
    if left is None and not any((run_dir / "checkpoints").glob("*")):
        return
    numbers = f"{left or 'checkpoints'} is there"
    advice = "Set another folder, or resume=<this one> to go on with that run"
    raise ConfigError(message("paths.run_dir", str(run_dir), "the folder holds the results of another run", numbers, advice))


def _check_packages(loggers: Mapping[str, Any]) -> None:
    for name, entry in loggers.items():
        target = str(entry["_target_"]) if isinstance(entry, Mapping) and "_target_" in entry else ""
        packages = _PACKAGES.get(target, ())
        if packages and not any(find_spec(each) for each in packages):
            rule, numbers = f"it needs the package {packages[0]}", "This Python has no such package"
            advice = f"pip install {packages[0]}, or set logger=csv"
            raise ConfigError(message(f"logger.{name}", target, rule, numbers, advice))


def _check_text(files: Sequence[str], max_bytes: int | None) -> None:
    """The standard library as a whole is text enough, and looking through it takes its time."""
    if files or max_bytes is not None:
        check_split(find_corpus(files, max_bytes), files)


def _check_module(config: RunConfig) -> None:
    """The language model of ours is one submodule; of a model of the user's own nothing is known here."""
    name = config.strategy.module
    if name is not None and config.model.get("_target_") == LANGUAGE_MODEL and name.partition(".")[0] != "model":
        rule = "it must be a submodule of the LightningModule"
        raise ConfigError(message("strategy.module", name, rule, "LanguageModel has model", "Set model, or leave it out"))


def _check_weights(given: str | None) -> None:
    if given is None:
        return
    key, path = "strategy.initial_weights", Path(given).expanduser()
    if not given.strip() or not path.exists():
        raise ConfigError(message(key, given, "there is no such file or folder", "", "Set one that exists"))
    if path.is_file() and path.suffix != ".safetensors" and not is_zipfile(path) and path.parent.name != "checkpoints":
        rule = "the file holds no weights"
        advice = "Set a Hugging Face folder, a safetensors file, a Lightning .ckpt or a checkpoint folder"
        raise ConfigError(message(key, given, rule, "torch.save writes a zip archive, and this is none", advice))


def _check_backend(given: str | None, accelerator: str) -> None:
    """NCCL works on GPUs. Of the others torch tells, which takes its import: they are asked for by name only."""
    parts = [] if given is None else [part.lower() for part in given.split(",")]
    for part in parts:
        name = part.rpartition(":")[2]
        spare = part.startswith("cuda:") and not version("torch").endswith("+cpu")
        if name == "nccl" and accelerator == "cpu" and not spare:
            rule, advice = "NCCL works on GPUs only", "Set gloo, or leave it out"
            raise ConfigError(message("strategy.process_group_backend", given, rule, "The ranks run on the CPU", advice))
        if name in ("mpi", "ucc", "xccl") and not _is_built_in(name):
            rule, advice = "torch was built without it", "Set gloo or nccl, or leave it out"
            raise ConfigError(message("strategy.process_group_backend", given, rule, "", advice))


def _is_built_in(name: str) -> bool:
    import torch.distributed

    return bool(getattr(torch.distributed, f"is_{name}_available")())


def too_many(world: World) -> str:
    """Why so many processes are more than this machine bears; empty: they are not."""
    cores = os.cpu_count() or 1
    most = max(_FEWEST, _PER_CORE * cores)
    if world.devices <= most:
        return ""
    rule = "so many processes on one machine would stop it"
    numbers = f"It has {cores} cores, and every process takes some 0.3 GB of memory before it has any work"
    return message("cluster.devices", world.devices, rule, numbers, f"Set sizes of {most} processes or fewer")


def too_few_gpus(world: World) -> str:
    """Why a run for a described cluster cannot be started here; empty: it can. GPUs of `local` were counted before."""
    found = visible_gpus() if world.accelerator == "cuda" else world.devices
    if found >= world.devices:
        return ""
    rule, numbers = "each needs a GPU", f"torch sees {found} here"
    advice = "Set trainer.accelerator=cpu, or cluster=local for what is here, or hydra/launcher=slurm to submit it"
    return message("cluster.devices", world.devices, rule, numbers, advice)


def _check_folder(key: str, given: str) -> None:
    """Makes a folder where the first missing part of the path would lie, with a file, and takes both away: no less would tell."""
    path = Path(given).expanduser().absolute()
    there = next(each for each in (path, *path.parents) if each.exists() or each.is_symlink())
    try:
        with tempfile.TemporaryDirectory(prefix=".hybrid-", dir=there) as folder:
            (Path(folder) / "trial").write_bytes(bytes(_TRIAL_BYTES))
    except OSError as error:
        numbers = f"{there}: {error.strerror}"
        raise ConfigError(
            message(key, given, "no folder can be made and filled there", numbers, "Set one that can be written to")
        ) from error
