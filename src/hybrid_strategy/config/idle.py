"""Settings that the user has typed and that would do nothing beside the others: refused, where no point of a sweep needs them.

What files and options say may stand idle: a preset sets what a layout needs, and another key may change the layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser

from hybrid_strategy.config.plan import RunPlan
from hybrid_strategy.config.settings import RunConfig
from hybrid_strategy.config.targets import BY_TARGET, CheckpointSettings, LearningRateMonitorSettings, ProgressSettings
from hybrid_strategy.errors import ConfigError, message

_CHECKPOINTS = ("strategy.asynchronous_checkpoint", "strategy.checkpoint_error", "strategy.checkpoint_when_busy")


@dataclass(frozen=True)
class Rule:
    """Keys that do nothing where something holds.

    Attributes:
        keys: full keys.
        holds: what makes them idle, in numbers; empty: they count.
        rule: why, in words.
        advice: what to set instead.
    """

    keys: tuple[str, ...]
    holds: Callable[[RunConfig, RunPlan], str]
    rule: str
    advice: str


def _where(key: str, *values: object) -> Callable[[RunConfig, RunPlan], str]:
    """Holds where the setting has one of these values."""
    group, _, name = key.partition(".")

    def holds(config: RunConfig, planned: RunPlan) -> str:
        value = getattr(getattr(config, group), name)
        return f"{key} is {value}" if any(value is each or (value == each and value is not None) for each in values) else ""

    return holds


def _one_sums(config: RunConfig, planned: RunPlan) -> str:
    layout = planned.plan.layout
    return "" if layout.data_parallel_size * layout.context_parallel_size > 1 else "strategy.data_parallel_size is 1"


def _overfits(config: RunConfig, planned: RunPlan) -> str:
    return f"trainer.overfit_batches is {config.trainer.overfit_batches}" if config.trainer.overfit_batches else ""


def _own_number(config: RunConfig, planned: RunPlan) -> str:
    """This machine has as many as there are processes, so another number does nothing; nodes of a cluster follow from it."""
    used = planned.world.devices
    return f"Processes here: {used}" if config.cluster.name == "local" and used != config.cluster.gpus_per_node else ""


def _writes_nothing(config: RunConfig, planned: RunPlan) -> str:
    """A callback of the user's own may write checkpoints by itself."""
    entries = (each for each in config.callbacks.values() if isinstance(each, Mapping))
    if any(not str(each["_target_"]).startswith(("lightning.", "hybrid_strategy.")) for each in entries):
        return ""
    return _where("trainer.enable_checkpointing", False)(config, planned)


RULES = (
    Rule(
        ("strategy.schedule", "strategy.stage_cuts"),
        _where("strategy.pipeline_parallel_size", 1),
        "there is no pipeline, so it would be ignored",
        "Leave it out, or set strategy.pipeline_parallel_size=2 or more",
    ),
    Rule(
        ("strategy.reduce_dtype",),
        _one_sums,
        "gradients are summed over one rank, so it would be ignored",
        "Leave it out, or set strategy.data_parallel_size=2 or more",
    ),
    Rule(
        _CHECKPOINTS,
        _writes_nothing,
        "no checkpoint is written, so it would be ignored",
        "Leave it out, or trainer.enable_checkpointing",
    ),
    Rule(
        ("learning_rate.min_ratio", "learning_rate.total_steps"),
        _where("learning_rate.schedule", "constant"),
        "a constant rate does not fall, so it would be ignored",
        "Leave it out, or set learning_rate.schedule=cosine or linear",
    ),
    Rule(
        ("learning_rate.exponent",),
        _where("learning_rate.scaling", "none", "auto", "linear", "sqrt"),
        "it is that of power scaling, so it would be ignored",
        "Leave it out, or set learning_rate.scaling=power",
    ),
    Rule(
        ("learning_rate.base_batch_size",),
        _where("learning_rate.scaling", "none"),
        "the rate is not scaled with the batch, so it would be ignored",
        "Leave it out, or set learning_rate.scaling=auto, linear, sqrt or power",
    ),
    Rule(
        ("trainer.val_check_interval", "trainer.check_val_every_n_epoch"),
        _where("trainer.limit_val_batches", 0),
        "nothing is validated, so it would be ignored",
        "Leave it out, or set trainer.limit_val_batches=1 or more",
    ),
    Rule(
        ("trainer.limit_train_batches", "trainer.limit_val_batches"),
        _overfits,
        "the batches that are overfitted take its place, so it would be ignored",
        "Leave it out, or set trainer.overfit_batches=0",
    ),
    Rule(
        ("trainer.limit_test_batches", "trainer.limit_predict_batches"),
        lambda config, planned: "A run is trained and validated",
        "nothing is tested or predicted, so it would be ignored",
        "Leave it out",
    ),
    Rule(
        ("cluster.gpus_per_node",),
        _own_number,
        "it is the number of processes on this machine, so it would be ignored",
        "Leave it out, or set cluster.devices",
    ),
)


def check_counted(config: RunConfig, planned: RunPlan, overrides: Iterable[str]) -> None:
    """Refuses what is typed for one run and would do nothing.

    Raises:
        ConfigError: the first such setting.
    """
    for refusal in judged(config, planned, overrides).values():
        if refusal is not None:
            raise refusal


def check_counted_somewhere(points: Sequence[tuple[RunConfig, RunPlan]], overrides: Sequence[str]) -> None:
    """Refuses what is typed for a sweep and would do nothing at any of its points; a point without use for it is a baseline.

    Raises:
        ConfigError: the first such setting.
    """
    found = [judged(*each, overrides) for each in points]
    for key in dict.fromkeys(key for each in found for key in each):
        refusals = [each[key] for each in found if key in each]
        if all(refusals) and refusals[0] is not None:
            raise refusals[0]


def idle_defaults(config: RunConfig, planned: RunPlan, overrides: Iterable[str]) -> tuple[str, ...]:
    """What a command to paste says in place of typed settings that do nothing: their defaults."""
    refused = (key for key, refusal in judged(config, planned, overrides).items() if refusal is not None)
    return tuple(f"{key}={_text(_default(config, key))}" for key in refused)


def _text(value: Any) -> str:
    return {None: "null", True: "true", False: "false"}[value] if value is None or isinstance(value, bool) else str(value)


def judged(config: RunConfig, planned: RunPlan, overrides: Iterable[str]) -> dict[str, ConfigError | None]:
    """The typed keys that have another value than their default; None: it counts."""
    found: dict[str, ConfigError | None] = {}
    rules = (*RULES, *_rules_of_callbacks(config))
    for key in (each for text in overrides for each in _keys(text)):
        value, unset = _value(config, key), _default(config, key)
        if value == unset or str(value).lower() == str(unset).lower():  # names of schedules may be typed in any case
            continue
        found[key] = None
        for rule in (each for each in rules if key in each.keys):
            numbers = rule.holds(config, planned)
            if numbers:
                found[key] = ConfigError(message(key, value, rule.rule, numbers, rule.advice))
                break
    return found


def _keys(override: str) -> Iterator[str]:
    """The full keys that it sets: one, or those of a mapping."""
    key, _, value = override.lstrip("+").partition("=")
    if not value.startswith("{"):
        yield key
        return
    parsed: Any = OverridesParser.create().parse_overrides([f"{key}={value}"])[0].value()
    yield from _leaves(key, parsed)


def _leaves(key: str, value: Any) -> Iterator[str]:
    if not isinstance(value, Mapping):
        yield key
        return
    for name, each in value.items():
        yield from _leaves(f"{key}.{name}", each)


def _rules_of_callbacks(config: RunConfig) -> Iterator[Rule]:
    """Those of the shipped callbacks, by the names of their entries."""
    logs = any(values is not None for values in config.logger.values())
    for name, entry in config.callbacks.items():
        kind = BY_TARGET.get(str(entry.get("_target_"))) if isinstance(entry, Mapping) else None
        every = tuple(f"callbacks.{name}.{key}" for key in entry or ())
        if kind is CheckpointSettings:
            off, advice = _where("trainer.enable_checkpointing", False), "Leave it out, or trainer.enable_checkpointing"
            yield Rule(every, off, "no checkpoint is written, so it would be ignored", advice)
            if entry["monitor"] is None:
                rule, advice = "the newest checkpoints are kept, so it would be ignored", f"Set callbacks.{name}.monitor"
                yield Rule((f"callbacks.{name}.mode",), _always(f"callbacks.{name}.monitor is null"), rule, advice)
        elif kind is ProgressSettings:
            off, advice = _where("trainer.enable_progress_bar", False), "Leave it out, or trainer.enable_progress_bar"
            yield Rule(every, off, "no progress is shown, so it would be ignored", advice)
        elif kind is LearningRateMonitorSettings and not logs:
            rule, advice = "nothing is logged, so it would be ignored", "Leave it out, or set logger=csv"
            yield Rule(every, _always("logger is none"), rule, advice)


def _always(numbers: str) -> Callable[[RunConfig, RunPlan], str]:
    return lambda config, planned: numbers


def _value(config: RunConfig, key: str) -> Any:
    found: Any = config
    for part in key.split("."):
        found = found.get(part) if isinstance(found, Mapping) else getattr(found, part, None)
    return found


def _default(config: RunConfig, key: str) -> Any:
    """Of a callback: that of its class."""
    entry, _, name = key.rpartition(".")
    kind = BY_TARGET.get(str(_value(config, f"{entry}._target_"))) if entry.startswith("callbacks.") else None
    return getattr(kind, name, None) if kind is not None else _value(RunConfig(), key)
