"""The two sweepers: every combination of values (`grid`), and every valid layout (`layouts`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn
from omegaconf import DictConfig

from hybrid_strategy.config.messages import HYDRA_ERRORS, explained
from hybrid_strategy.config.schema import read
from hybrid_strategy.config.settings import RunConfig
from hybrid_strategy.errors import HybridError
from hybrid_strategy.sweeping.grid import Choice, Overrides, choices_of, every, sets_of
from hybrid_strategy.sweeping.launching import nothing_to_run
from hybrid_strategy.sweeping.layouts import Candidate, Skipped, layouts
from hybrid_strategy.sweeping.pruning import Judge, Judged, prune, take_best
from hybrid_strategy.sweeping.session import Session, key_of
from hybrid_strategy.sweeping.settings import GridSettings, LayoutsSettings
from hybrid_strategy.sweeping.space import axes_of, devices_at_hand, is_axis, is_known, judge_of, space_of

_OUR_LAUNCHERS = "hydra_plugins.hybrid_strategy_plugins."

Launch = Callable[[Sequence[Sequence[str]]], Any]


@dataclass(frozen=True)
class Sweep:
    """What Hydra gives a sweeper."""

    loader: Any
    master: DictConfig
    settings: GridSettings
    session: Session


def sweep_grid(sweep: Sweep, arguments: Sequence[str], launch: Launch) -> Any:
    """Every combination, and every set that goes together."""
    return _guarded(sweep, launch, lambda: grid_points(sweep, arguments))


def sweep_layouts(sweep: Sweep, arguments: Sequence[str], launch: Launch) -> Any:
    """Every valid layout, for every combination of the other keys."""
    return _guarded(sweep, launch, lambda: layout_points(sweep, arguments))


def _guarded(sweep: Sweep, launch: Launch, make: Callable[[], list[Overrides]]) -> Any:
    """Errors are kept in the session: Hydra would print them its own way."""
    try:
        points = make()
        if not points:
            raise nothing_to_run(sweep.session.skipped)
        if not is_ours(sweep.master):  # ours look at all points themselves, before anything is written
            for each in points:
                _composed(sweep, each)
    except HybridError as error:
        sweep.session.error = error
        return []
    returned = launch(points)
    sweep.session.failed.extend(_failures(returned))
    return [returned]


def is_ours(config: DictConfig) -> bool:
    """Is the launcher one of the package's?"""
    return str(config.hydra.launcher.get("_target_")).startswith(_OUR_LAUNCHERS)


def _failures(returned: Sequence[JobReturn]) -> Iterator[str]:
    """What points say that another launcher than ours has run, perhaps in processes of its own: text is a failure's."""
    for job in returned:
        try:
            value = job.return_value
        except Exception as error:  # Hydra raises what the job has raised, whatever that is
            value = f"{' '.join(job.overrides or ())}: {type(error).__name__}: {error}"
        if isinstance(value, str):
            yield value


def grid_points(sweep: Sweep, arguments: Sequence[str]) -> list[Overrides]:
    """The overrides of all points."""
    choices, sets = _asked_for(sweep, arguments)
    return [(*each, *rest) for each in sets for rest in every(choices)]


def layout_points(sweep: Sweep, arguments: Sequence[str]) -> list[Overrides]:
    """The overrides of all points, by arithmetic; nothing is composed but the keys that are no layout."""
    choices, sets = _asked_for(sweep, arguments)
    outer = [each for each in choices if not is_axis(each.key)]
    points: list[Overrides] = []
    for base in [(*each, *rest) for each in sets for rest in every(outer)]:
        config = _composed(sweep, base)
        points += _of_base(sweep, base, config, [each for each in choices if is_axis(each.key)])
    return points


def _asked_for(sweep: Sweep, arguments: Sequence[str]) -> tuple[list[Choice], list[list[str]]]:
    """Keys with their values, and sets that go together; what does not vary is noted as common to all points."""
    choices = choices_of(sweep.settings.params, arguments, sweep.loader)
    sets = sets_of(sweep.settings.points, choices)
    sweep.session.common.update(each.overrides[0] for each in choices if len(each.overrides) == 1)
    if len(sets) > 1:
        sweep.session.common.update(set.intersection(*map(set, sets)))
    return choices, sets


def _composed(sweep: Sweep, overrides: Overrides) -> RunConfig:
    try:
        config = sweep.loader.load_sweep_config(sweep.master, list(overrides))
        HydraConfig.instance().set_config(config)
        return read(config, "<run>")
    except HYDRA_ERRORS as error:
        raise explained(error) from error
    finally:
        HydraConfig.instance().cfg = None


def _of_base(sweep: Sweep, base: Overrides, config: RunConfig, choices: Sequence[Choice]) -> Iterator[Overrides]:
    settings = sweep.settings
    assert isinstance(settings, LayoutsSettings)  # by the door of this sweeper
    axes = axes_of(choices, settings.axes, config, any(each.startswith("strategy=") for each in base))
    judged, skipped = judged_layouts(config, settings, layouts(space_of(config, axes)), judge_of(config, settings, axes))
    sweep.session.skipped.extend(skipped)
    devices = devices_at_hand(config)
    sweep.session.common.update(_devices(base, devices))
    for each in judged:
        overrides = (*base, *_overrides(each.candidate.values), *_devices(base, devices))
        sweep.session.forecasts[key_of(overrides)] = _forecast(each, config)
        yield overrides


def judged_layouts(
    config: RunConfig, settings: LayoutsSettings, found: Iterator[Candidate | Skipped], judge: Judge | None
) -> tuple[list[Judged], list[Skipped]]:
    """The layouts to run, and all others with their reasons.

    Of machines that are not described the forecast has no say in what is run, except where only the best so many are wanted.
    """
    everything = list(found)
    if judge is None or not (is_known(config) or settings.top):
        candidates = [Judged(each, 0.0) for each in everything if isinstance(each, Candidate)]
        skipped = [each for each in everything if isinstance(each, Skipped)]
    elif settings.prune and is_known(config):
        candidates, skipped = prune(everything, judge)
    else:
        candidates, skipped = judge.all_of(everything)
    if settings.top:
        candidates, rest = take_best(candidates, settings.top)
        skipped = skipped + rest
    return candidates, skipped


def _overrides(values: Mapping[str, Any]) -> list[str]:
    return [f"strategy.{axis}={str(value).lower() if isinstance(value, bool) else value}" for axis, value in values.items()]


def _devices(base: Overrides, devices: int) -> list[str]:
    """All layouts of a sweep are over the same processes."""
    named = any(each.lstrip("+").startswith("cluster.devices=") for each in base)
    return [] if named else [f"++cluster.devices={devices}"]


def _forecast(judged: Judged, config: RunConfig) -> dict[str, Any]:
    """What the table and the report set beside the measured values; only of machines that are described."""
    if judged.step_seconds is None or not is_known(config):
        return {}
    tokens = judged.candidate.batch.global_batch_size * int(config.model.get("sequence_length", 0))
    return {
        "forecast_step_seconds": judged.step_seconds,
        "forecast_memory_bytes": judged.memory_bytes,
        "forecast_tokens_per_second": tokens / judged.step_seconds,
    }
