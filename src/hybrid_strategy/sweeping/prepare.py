"""From the overrides of a point to all that is needed to run it, or to the reason why it is not run."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from hybrid_strategy.config.compose import Source, compose
from hybrid_strategy.config.here import check_present, too_few_gpus, too_many
from hybrid_strategy.config.idle import check_counted, check_counted_somewhere, idle_defaults
from hybrid_strategy.config.messages import HYDRA_ERRORS, explained
from hybrid_strategy.config.overrides import check_nothing_ignored
from hybrid_strategy.config.plan import RunPlan, plan_of
from hybrid_strategy.config.resume import find_checkpoint
from hybrid_strategy.config.schema import read
from hybrid_strategy.config.secrets import check_hydra
from hybrid_strategy.config.settings import AUTO, ClusterSettings, RunConfig
from hybrid_strategy.config.storage import moved
from hybrid_strategy.config.targets import BY_TARGET, MlflowSettings, WandbSettings
from hybrid_strategy.config.world import visible_gpus
from hybrid_strategy.errors import LayoutError, ModelError
from hybrid_strategy.sweeping.facts import facts_of
from hybrid_strategy.sweeping.heard import check_heard
from hybrid_strategy.sweeping.layouts import Skipped, check_values
from hybrid_strategy.sweeping.naming import tags, unique
from hybrid_strategy.sweeping.points import Point, Resources, digest_of
from hybrid_strategy.sweeping.session import Session, key_of

_SOMEWHERE = "/-the-folder-of-the-run-/"
"""Stands for a point's folder until it has a name."""


@dataclass(frozen=True)
class Composed:
    """A point as composed, before it has a name and a folder. `launcher` holds the launcher's settings for it."""

    overrides: tuple[str, ...]
    swept: Mapping[str, str]
    number: int
    config: RunConfig
    planned: RunPlan
    launcher: Mapping[str, Any]


@dataclass(frozen=True)
class Ready:
    """A point with its configuration, in its folder-to-be."""

    point: Point
    config: RunConfig
    planned: RunPlan


@dataclass(frozen=True)
class Batch:
    """What a launcher was given. `master` is the sweep's own configuration, `loader` Hydra's loader of configurations, `local`:
    the processes will be started on this machine."""

    loader: Any
    master: DictConfig
    overrides: Sequence[Sequence[str]]
    first: int = 0
    local: bool = False


def prepare(batch: Batch, session: Session, folder: Path) -> list[Ready]:
    """The points of a batch, in order; what the planner refuses goes to the session's list of skipped ones.

    Args:
        folder: of the sweep, or of the run where there is only one.

    Raises:
        ConfigError: something is wrong that no layout would mend.
    """
    composed, number = [], batch.first
    for overrides in batch.overrides:
        found = _compose(batch, tuple(overrides), number, session)
        if isinstance(found, Skipped):
            session.skipped.append(found)
        else:
            composed.append(found)
        number += 1
    typed = _typed(batch.master)
    check_counted_somewhere([(each.config, each.planned) for each in composed], typed)
    words = [tags(each.swept, each.planned.plan) for each in composed]
    names = ["_".join(each) or one.planned.plan.layout.name for each, one in zip(words, composed, strict=True)]
    names = unique(names, [each.swept for each in composed], [each.name for each in session.points])
    if session.single:
        names = [each.config.name for each in composed]
    starts = Starts(session)
    return [_ready(each, name, starts, folder) for each, name in zip(composed, names, strict=True)]


def prepare_alone(source: Source, folder: Path, session: Session) -> Ready:
    """One run in its folder, without a sweep.

    Raises:
        HybridError: it cannot be run.
    """
    composed = compose(source)
    check_nothing_ignored(source.overrides, composed.model)
    try:
        with _hydra(composed):
            config = read(composed, _SOMEWHERE)
    except HYDRA_ERRORS as error:
        raise explained(error) from error
    made = Composed(source.overrides, {}, 0, config, plan_of(config), {})
    check_counted(config, made.planned, source.overrides)
    return _ready(made, config.name, Starts(session), folder)


@dataclass(frozen=True)
class Starts:
    """Where first attempts begin, by what `resume` says; a checkpoint is verified once for all points that begin there."""

    session: Session
    known: dict[tuple[str | None, ...], str | None] = field(default_factory=dict)

    def of(self, config: RunConfig) -> str | None:
        """The checkpoint; None: at the beginning.

        Raises:
            ConfigError: the path does not exist, or holds no checkpoint that can be trusted.
        """
        key = (config.resume, config.name, config.paths.output_dir)
        if key not in self.known:
            found = find_checkpoint(config)
            self.known[key] = str(found.path) if found.path is not None else None
            lines = [f"skipped {name}: {why}" for name, why in found.skipped]
            if config.resume is not None and found.path is None:
                lines.append(f"nothing to resume for {config.name}: starting anew")
            for line in lines:
                self.session.console.print(line, markup=False, highlight=False, soft_wrap=True)
        return self.known[key]


def _compose(batch: Batch, overrides: tuple[str, ...], number: int, session: Session) -> Composed | Skipped:
    swept = swept_of(batch.master, overrides, session.common)
    try:
        config = batch.loader.load_sweep_config(batch.master, list(overrides))
        check_nothing_ignored(overrides, config.model)
        with read_write(config), open_dict(config):
            config.hydra.job.num, config.hydra.job.id = number, str(number)
        with _hydra(config):
            check_hydra(config)
            check_heard(config, session.single)
            launcher: Any = OmegaConf.to_container(config.hydra.launcher, resolve=True)
            settings = on_machines(read(config, _SOMEWHERE))
    except HYDRA_ERRORS as error:
        raise explained(error) from error
    for axis in ("sharding", "activation_checkpoint", "schedule"):
        value = getattr(settings.strategy, axis)
        check_values(axis, () if value == AUTO else (value,))
    try:
        planned = plan_of(settings)
        if not launcher.get("python"):  # else what is here says nothing of what is there
            check_present(settings, planned.world)
        reason = _not_here(settings, planned, batch.local)
    except (LayoutError, ModelError) as error:
        reason = str(error)
    if reason:
        name = ", ".join(f"{key.lstrip('+')}={value}" for key, value in swept.items()) or f"point{number}"
        return Skipped(name, "refused", reason, dict(swept))
    return Composed(overrides, swept, number, settings, planned, {str(key): value for key, value in launcher.items()})


def _not_here(config: RunConfig, planned: RunPlan, local: bool) -> str:
    """Why this machine cannot run the point as the others. One that a single run would put on the CPU, for want of GPUs, is no
    point beside others on GPUs."""
    world, gpus = planned.world, visible_gpus()
    if local and world.num_nodes > 1:
        return f"it needs {world.num_nodes} nodes, and the local launcher starts the processes of one. Set hydra/launcher=slurm."
    if local and (wrong := too_many(world) or too_few_gpus(world)):
        return wrong
    if config.cluster.name != "local" or config.trainer.accelerator == "cpu" or not gpus or world.accelerator != "cpu":
        return ""
    return f"it needs {world.size} GPUs, and there are {gpus} here. Set trainer.accelerator=cpu to run all points on the CPU."


@contextmanager
def _hydra(config: DictConfig) -> Iterator[None]:
    """What `${hydra:...}` looks at while a point is resolved."""
    before = HydraConfig.instance().cfg
    with read_write(config.hydra.runtime), open_dict(config.hydra.runtime):
        config.hydra.runtime.output_dir = _SOMEWHERE
    HydraConfig.instance().set_config(config)
    try:
        yield
    finally:
        HydraConfig.instance().cfg = before


def _ready(composed: Composed, name: str, starts: Starts, sweep: Path) -> Ready:
    session = starts.session
    folder = sweep if session.single else sweep / name
    # the folder is known only after the plan; composing the point again would take as long again
    config = _decided(moved(composed.config, _SOMEWHERE, str(folder)), composed.planned)
    words = tags(composed.swept, composed.planned.plan)
    digest = digest_of(config, folder)
    config = replace(config, resume=starts.of(config))
    # a single run that goes on is the W&B run that its checkpoint names, as on this machine
    wandb_id = "" if session.single and config.resume else os.urandom(4).hex()
    group = "" if session.single else sweep.name
    config = _named(config, Naming(config.name if session.single else name, group, tuple(words), wandb_id))
    world = composed.planned.world
    point = Point(
        name=name,
        folder=folder,
        overrides=composed.overrides,
        swept=composed.swept,
        tags=tuple(words),
        resources=Resources(world.num_nodes, world.devices, world.accelerator != "cpu"),
        facts={**facts_of(config, composed.planned), **session.forecasts.get(key_of(composed.overrides), {})},
        digest=digest,
        wandb_id=wandb_id,
        start=config.resume,
        launcher=composed.launcher,
        idle=idle_defaults(composed.config, composed.planned, composed.overrides),
    )
    return Ready(point, config, composed.planned)


def _typed(master: DictConfig) -> list[str]:
    """The command line, word by word: an interpolation in it is of the place that it is for, and may be a secret's."""
    found = OmegaConf.to_container(master.hydra.overrides.task, resolve=False)
    assert isinstance(found, list)
    return [str(each) for each in found]


def swept_of(master: DictConfig, overrides: Sequence[str], common: Set[str] = frozenset()) -> dict[str, str]:
    """The overrides of a point that neither the command line nor the sweep says of every point, but for those of its job."""
    common = common | set(_typed(master))
    found = {}
    for each in overrides:
        key, _, value = each.partition("=")
        if each not in common and not key.lstrip("+").startswith("hydra."):
            found[key] = value
    return found


def on_machines(config: RunConfig) -> RunConfig:
    """On a described cluster the nodes follow from the layout, where all of its sizes are given and the processes are not."""
    given, cluster = config.strategy, config.cluster
    asked = (given.data_parallel_size, given.tensor_parallel_size, given.pipeline_parallel_size, given.context_parallel_size)
    sizes = [each for each in asked if isinstance(each, int)]
    if cluster.name == "local" or cluster.devices != "auto" or len(sizes) < len(asked):
        return config
    needed = math.prod(sizes)
    nodes, rest = divmod(needed, cluster.gpus_per_node)
    if needed < 1 or (nodes and rest):
        return config
    made: ClusterSettings = replace(cluster, num_nodes=max(1, nodes), devices=cluster.gpus_per_node if nodes else rest)
    return replace(config, cluster=made)


def _decided(config: RunConfig, planned: RunPlan) -> RunConfig:
    """What follows from this machine is written down: the point may run on another, or see fewer GPUs there."""
    world = planned.world
    cluster = replace(config.cluster, num_nodes=world.num_nodes, devices=world.devices)
    return replace(config, cluster=cluster, trainer=replace(config.trainer, accelerator=world.accelerator))


@dataclass(frozen=True)
class Naming:
    """How a run is called where it is logged."""

    name: str
    group: str
    tags: tuple[str, ...]
    wandb_id: str


def _named(config: RunConfig, naming: Naming) -> RunConfig:
    """W&B and MLflow: group = sweep, name = point, one tag for each thing that varies, one run for all attempts."""
    named = {WandbSettings: _in_wandb, MlflowSettings: _in_mlflow}
    loggers = {}
    for key, entry in config.logger.items():
        name = named.get(BY_TARGET.get(str(entry.get("_target_")), object)) if isinstance(entry, Mapping) else None
        loggers[key] = name(entry, config, naming) if name is not None else entry
    return replace(config, logger=loggers)


def _in_wandb(entry: Mapping[str, Any], config: RunConfig, naming: Naming) -> Mapping[str, Any]:
    own = {"name": naming.name} if entry.get("name") in (None, config.name) else {}
    labels = tuple(dict.fromkeys([*entry.get("tags", ()), *naming.tags]))
    group = entry.get("group") or naming.group or None
    return {**entry, **own, "tags": labels, "id": entry.get("id") or naming.wandb_id or None, "group": group}


def _in_mlflow(entry: Mapping[str, Any], config: RunConfig, naming: Naming) -> Mapping[str, Any]:
    own = {"run_name": naming.name} if entry.get("run_name") in (None, config.name) else {}
    labels = {"sweep": naming.group} if naming.group else {}
    return {**entry, **own, "tags": {**labels, **dict.fromkeys(naming.tags, "true"), **entry.get("tags", {})}}
