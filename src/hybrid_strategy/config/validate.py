"""Words of the configuration that Lightning or the model would refuse only after the processes have started."""

from __future__ import annotations

from collections.abc import Iterable

from hybrid_strategy.config.settings import STRATEGY_TARGET, RunConfig
from hybrid_strategy.config.targets import TEXT_DATA
from hybrid_strategy.errors import ConfigError, did_you_mean, message
from hybrid_strategy.planning.learning_rate import RULES, SCHEDULES

PRECISIONS = ("32-true", "bf16-mixed", "bf16-true", "16-mixed", "16-true", "64-true")
MATMUL_PRECISIONS = ("highest", "high", "medium")
CLIP_ALGORITHMS = ("norm", "value")
OPTIMIZERS = ("adamw", "sgd")
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
    _check_at_least(config)
    _check_text_fits_model(config)


def _check_text_fits_model(config: RunConfig) -> None:
    """Tokens of the data must be tokens of the model, and its sequences no longer than the model's."""
    if config.data.get("_target_") != TEXT_DATA:
        return
    for key in ("vocab_size", "sequence_length"):
        given, limit = config.data.get(key), config.model.get(key)
        if isinstance(given, int) and isinstance(limit, int) and given > limit:
            raise ConfigError(
                message(f"data.{key}", given, f"it may not exceed model.{key}", f"That is {limit}", f"Set {limit} or less")
            )


def _check_word(key: str, word: str | None, known: Iterable[str]) -> None:
    if word is not None and word not in known:
        raise ConfigError(message(key, word, "there is none of this name", "", did_you_mean(word, known)))


def _check_at_least(config: RunConfig) -> None:
    for key, value, least in (
        ("seed", config.seed, 0),
        ("cluster.num_nodes", config.cluster.num_nodes, 1),
        ("trainer.accumulate_grad_batches", config.trainer.accumulate_grad_batches, 1),
        ("trainer.max_steps", config.trainer.max_steps, -1),
        ("learning_rate.warmup_steps", config.learning_rate.warmup_steps, 0),
        ("optimizer.learning_rate", config.optimizer.learning_rate, 0),
        ("optimizer.weight_decay", config.optimizer.weight_decay, 0),
    ):
        if value < least:
            raise ConfigError(message(key, value, f"it must be {least} or more", "", f"Set {least} or more"))
