"""Words of the configuration that Lightning or the model would refuse only after the processes have started."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from hybrid_strategy import registry
from hybrid_strategy.config.messages import Shown
from hybrid_strategy.config.settings import AUTO, STRATEGY_TARGET, RunConfig
from hybrid_strategy.config.targets import TEXT_DATA, CheckpointSettings, shape_of
from hybrid_strategy.errors import ConfigError, ModelError, did_you_mean, message
from hybrid_strategy.planning.learning_rate import RULES, SCHEDULES
from hybrid_strategy.spec.families import OPTIONS, shape_refusal
from hybrid_strategy.spec.parallel_plan import plan_from
from hybrid_strategy.spec.training import OptimizerSpec

PRECISIONS = ("32-true", "bf16-mixed", "bf16-true", "16-mixed", "16-true", "64-true")
MATMUL_PRECISIONS = ("highest", "high", "medium")
CLIP_ALGORITHMS = ("norm", "value")
OPTIMIZERS = ("adamw", "sgd")
SMALLEST_VOCABULARY = 257
"""256 bytes and the end of a text."""

_AXES = ("data_parallel", "tensor_parallel", "pipeline_parallel", "context_parallel", "data_parallel_replicate")
_PARTS = ("stages_per_rank", "num_microbatches", "micro_batch_size")

PROFILERS = ("simple", "advanced", "pytorch")


def check_words(config: RunConfig) -> None:
    """Refuse words that are not known, and numbers outside their range.

    Raises:
        ConfigError: by full key, with the nearest word.
    """
    for key, word, known in (
        ("strategy._target_", config.strategy._target_, (STRATEGY_TARGET,)),
        ("precision.mode", config.precision.mode, PRECISIONS),
        ("precision.float32_matmul", config.precision.float32_matmul, MATMUL_PRECISIONS),
        ("optimizer.name", config.optimizer.name, OPTIMIZERS),
        ("learning_rate.schedule", config.learning_rate.schedule, SCHEDULES),
        ("learning_rate.scaling", config.learning_rate.scaling, RULES),
        ("trainer.profiler", config.trainer.profiler, PROFILERS),
        ("trainer.gradient_clip_algorithm", config.trainer.gradient_clip_algorithm, CLIP_ALGORITHMS),
    ):
        _check_word(key, word, known)
    if config.strategy.sequence_parallel not in (True, False, AUTO):
        raise ConfigError(
            message(
                "strategy.sequence_parallel",
                config.strategy.sequence_parallel,
                "it must be true or false, or auto",
                "",
                "Set false",
            )
        )
    _check_sizes(config)
    _check_nothing_ignored(config)
    _check_exclusive(config)
    _check_end(config)
    if isinstance(config.strategy.parallel_plan, Mapping):
        plan_from(config.strategy.parallel_plan, "strategy.parallel_plan")
    _check_text_fits_model(config)


def check_model(config: RunConfig) -> None:
    """Refuses a shape that no family of ours can be built in.

    Raises:
        ModelError: an unknown family, or sizes that it does not have.
    """
    shape = shape_of(config)
    if shape is None:
        return
    known = registry.names("models")
    if shape.family not in known:
        rule = "there is no model family of this name"
        raise ModelError(message("model.family", shape.family, rule, "", did_you_mean(shape.family, known)))
    refusal = shape_refusal(shape)
    if refusal is not None:
        raise ModelError(message(f"model.{refusal[0]}", *refusal[1:]))
    for name, value in (config.model.get("options") or {}).items():
        if name not in OPTIONS.get(shape.family, (name,)):
            rule, advice = f"the family {shape.family} has no such option", did_you_mean(name, OPTIONS[shape.family])
            raise ModelError(message(f"model.options.{name}", value, rule, "", advice))


def _check_text_fits_model(config: RunConfig) -> None:
    """Tokens of the data must be tokens of the model, and its sequences no longer than the model's."""
    if config.data.get("_target_") != TEXT_DATA:
        rows = config.data.get("batch_size")
        if isinstance(rows, int) and rows < 1:
            raise ConfigError(message("data.batch_size", rows, "it must be 1 or more", "", "Set 1 or more"))
        return
    _check_text(config)
    for key in ("vocab_size", "sequence_length"):
        given, limit = config.data.get(key), config.model.get(key)
        if isinstance(given, int) and isinstance(limit, int) and given > limit:
            raise ConfigError(
                message(f"data.{key}", given, f"it may not exceed model.{key}", f"That is {limit}", f"Set {limit} or less")
            )


def _check_text(config: RunConfig) -> None:
    """What the preparation of text refuses, by the keys of the configuration."""
    given = config.data
    vocabulary = given.get("vocab_size") or config.model.get("vocab_size")
    for key, value, least in (
        ("data.max_bytes", given.get("max_bytes"), 1),
        ("data.num_workers", given.get("num_workers"), 0),
        ("data.sequence_length", given.get("sequence_length"), 1),
        ("data.vocab_size" if given.get("vocab_size") else "model.vocab_size", vocabulary, SMALLEST_VOCABULARY),
    ):
        if isinstance(value, int) and value < least:
            raise ConfigError(message(key, value, f"it must be {least} or more", "", f"Set {least} or more"))
    fraction = given.get("validation_fraction")
    if isinstance(fraction, (int, float)) and not 0 < fraction < 1:
        raise ConfigError(message("data.validation_fraction", fraction, "it must lie between 0 and 1", "", "Set e.g. 0.01"))


def _check_word(key: str, word: str | None, known: Iterable[str]) -> None:
    if word is not None and word not in known:
        raise ConfigError(message(key, word, "there is none of this name", "", did_you_mean(word, known)))


def _check_sizes(config: RunConfig) -> None:
    """A size is a number or `auto`; another word is a slip of the pen, not a layout that happens not to fit."""
    for key in (*(f"{axis}_size" for axis in _AXES), *_PARTS):
        value = getattr(config.strategy, key)
        if isinstance(value, str) and value != AUTO:
            raise ConfigError(
                message(f"strategy.{key}", value, "it must be a whole number of 1 or more, or auto", "", "Set 1 or more, or auto")
            )


def _check_nothing_ignored(config: RunConfig) -> None:
    """Settings that would do nothing beside the others."""
    trainer, optimizer, unset = config.trainer, config.optimizer, OptimizerSpec()
    interval = trainer.val_check_interval
    if trainer.check_val_every_n_epoch is None and (not isinstance(interval, int) or isinstance(interval, bool)):
        rule, numbers = "validation is then counted in batches over all epochs", f"trainer.val_check_interval is {interval}"
        advice = "Set trainer.val_check_interval to a whole number, or trainer.check_val_every_n_epoch=1"
        raise ConfigError(message("trainer.check_val_every_n_epoch", Shown("null"), rule, numbers, advice))
    for least, most in (("min_steps", "max_steps"), ("min_epochs", "max_epochs")):
        lower, upper = getattr(trainer, least), getattr(trainer, most)
        if lower is not None and upper is not None and 0 <= upper < lower:
            numbers, advice = f"trainer.{most} is {upper}", f"Set {upper} or less, or a larger trainer.{most}"
            raise ConfigError(message(f"trainer.{least}", lower, f"the run ends at {most}", numbers, advice))
    if trainer.gradient_clip_algorithm is not None and not trainer.gradient_clip_val:
        key, numbers = "trainer.gradient_clip_algorithm", f"trainer.gradient_clip_val is {trainer.gradient_clip_val}"
        advice = "Leave it out, or set trainer.gradient_clip_val"
        raise ConfigError(message(key, trainer.gradient_clip_algorithm, "it would be ignored", numbers, advice))
    for key, name in (("momentum", "adamw"), ("betas", "sgd"), ("eps", "sgd")):
        if optimizer.name == name and getattr(optimizer, key) != getattr(unset, key):
            rule, numbers = "it would be ignored", f"{name} has none"
            raise ConfigError(message(f"optimizer.{key}", getattr(optimizer, key), rule, numbers, "Leave it out"))


def _check_exclusive(config: RunConfig) -> None:
    """Settings that torch's optimizers and Lightning's callbacks refuse together."""
    if config.optimizer.foreach and config.optimizer.fused:
        rule, numbers = "an optimizer is one or the other", "optimizer.foreach is True"
        raise ConfigError(message("optimizer.fused", True, rule, numbers, "Set one of them"))
    for name, entry in config.callbacks.items():
        if not isinstance(entry, Mapping) or entry.get("_target_") != CheckpointSettings._target_:
            continue
        key = f"callbacks.{name}"
        if entry["save_top_k"] > 1 and entry["monitor"] is None:
            rule, numbers = "the best are told by a metric", f"{key}.monitor is null, and the newest is kept"
            advice = f"Set 1, -1 for all, or {key}.monitor=val_loss"
            raise ConfigError(message(f"{key}.save_top_k", entry["save_top_k"], rule, numbers, advice))
        if entry["every_n_train_steps"] and entry["every_n_epochs"]:
            rule, numbers = (
                "checkpoints come by steps or by epochs",
                f"{key}.every_n_train_steps is {entry['every_n_train_steps']}",
            )
            raise ConfigError(message(f"{key}.every_n_epochs", entry["every_n_epochs"], rule, numbers, "Set one of them"))


def _check_end(config: RunConfig) -> None:
    """A rate that falls must know when it has fallen; a model of the user's own makes its own."""
    given, trainer = config.learning_rate, config.trainer
    epochs = trainer.max_epochs if trainer.max_epochs is not None or trainer.max_time is None else -1
    ends = trainer.max_steps >= 0 or epochs != -1 or trainer.fast_dev_run
    if ends or given.schedule == "constant" or given.total_steps or shape_of(config) is None:
        return
    rule, numbers = (
        f"the schedule {given.schedule} falls until then",
        "The run has no trainer.max_steps and no trainer.max_epochs",
    )
    advice = "Set one of the three, or learning_rate.schedule=constant"
    raise ConfigError(message("learning_rate.total_steps", given.total_steps, rule, numbers, advice))
