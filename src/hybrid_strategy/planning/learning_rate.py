"""Learning rate as pure functions: how it grows with the batch, and its value at a step."""

from __future__ import annotations

import math

from hybrid_strategy.errors import ConfigError, did_you_mean, message
from hybrid_strategy.spec.training import LearningRateSpec, OptimizerSpec
from hybrid_strategy.units import format_count

RULES = ("none", "linear", "sqrt", "power", "auto")
SCHEDULES = ("cosine", "linear", "constant")

_LINEAR_OPTIMIZERS = ("sgd",)


def scaled_learning_rate(
    base: float,
    global_batch_size: int,
    base_batch_size: int,
    rule: str = "none",
    exponent: float = 0.5,
    optimizer: str = "adamw",
) -> float:
    """The peak rate for a batch of another size than the one the base rate was found with.

    Args:
        base: rate that suits `base_batch_size`.
        global_batch_size: samples of an optimizer step over all data-parallel ranks and accumulated batches; tensor- and
            pipeline-parallel ranks do not enlarge it.
        base_batch_size: samples of the step that `base` was found with.
        rule: `none`; `linear` (arXiv:1706.02677, section 2.1); `sqrt` (arXiv:2205.10287, for Adam); `power`: to `exponent`;
            `auto`: linear for SGD, square root for any other optimizer, and without a base batch size none.
        optimizer: name of the optimizer, for `auto`.

    Raises:
        ConfigError: an unknown rule, or a rule without a base batch size.

    >>> [scaled_learning_rate(1e-3, 512, 128, rule) for rule in ("none", "linear", "sqrt", "auto")]
    [0.001, 0.004, 0.002, 0.002]
    >>> scaled_learning_rate(1e-3, 512, 128, "auto", optimizer="SGD"), scaled_learning_rate(1.0, 512, 64, "power", exponent=1 / 3)
    (0.004, 2.0)
    """
    _check_word("learning_rate.scaling", rule, RULES)
    if rule == "none" or (rule == "auto" and base_batch_size == 0):
        return base
    if base_batch_size < 1:
        advice = "Set the global batch size that the rate was found with, or learning_rate.scaling=none"
        raise ConfigError(message("learning_rate.base_batch_size", base_batch_size, f"{rule} scaling needs it", "", advice))
    return float(base * (global_batch_size / base_batch_size) ** _power(rule, exponent, optimizer))


def _power(rule: str, exponent: float, optimizer: str) -> float:
    """The power of the batch's growth."""
    if rule == "auto":
        rule = "linear" if optimizer.lower() in _LINEAR_OPTIMIZERS else "sqrt"
    return {"linear": 1.0, "sqrt": 0.5, "power": exponent}[rule]


def warmup_steps(spec: LearningRateSpec, step_tokens: int) -> int:
    """Steps of the warm-up: given, or as many as its tokens need.

    Raises:
        ConfigError: both are given.

    >>> warmup_steps(LearningRateSpec(warmup_tokens=1_000_000), 4096), warmup_steps(LearningRateSpec(warmup_steps=9), 4096)
    (245, 9)
    """
    if spec.warmup_tokens and spec.warmup_steps:
        rule, numbers = "it and warmup_steps say the same thing in two ways", f"warmup_steps is {spec.warmup_steps}"
        raise ConfigError(message("learning_rate.warmup_tokens", spec.warmup_tokens, rule, numbers, "Set one of them to 0"))
    return -(-spec.warmup_tokens // step_tokens) if spec.warmup_tokens else spec.warmup_steps


def learning_rate_text(optimizer: OptimizerSpec, spec: LearningRateSpec, global_batch_size: int, step_tokens: int) -> str:
    """The peak, how it follows from the batch, and the warm-up, in words.

    >>> spec = LearningRateSpec(base_batch_size=256, warmup_steps=10)
    >>> learning_rate_text(OptimizerSpec(learning_rate=1e-3), spec, 1024, 2048)
    '0.002 at its peak = 0.001 x (1024 / 256)^0.5, auto rule of adamw; warm-up over 10 steps, 20.48k tokens; then cosine'
    """
    base, rule = spec.base_batch_size, spec.scaling
    peak = scaled_learning_rate(optimizer.learning_rate, global_batch_size, base, rule, spec.exponent, optimizer.name)
    text = f"{peak:g} at its peak"
    if rule != "none" and base:
        power = _power(rule, spec.exponent, optimizer.name)
        text += f" = {optimizer.learning_rate:g} x ({global_batch_size} / {base})^{power:g}, {rule} rule of {optimizer.name}"
    steps = warmup_steps(spec, step_tokens) if step_tokens else spec.warmup_steps
    if steps:
        text += f"; warm-up over {steps} steps" + (f", {format_count(steps * step_tokens)} tokens" if step_tokens else "")
    return f"{text}; then {spec.schedule}"


def learning_rate_at(step: int, spec: LearningRateSpec, peak: float) -> float:
    """The rate of optimizer step `step` (the first is 0).

    It rises over `warmup_steps` steps, the last of which has the peak, then falls to `min_ratio * peak` at `total_steps`, along
    half a cosine (arXiv:1608.03983, equation 5, no restart) or a line, or stays. After `total_steps` it stays at its last value.

    Args:
        step: number of optimizer steps taken before; not batches, not micro-batches.
        spec: warm-up and decay.
        peak: rate at the end of the warm-up.

    Raises:
        ConfigError: an unknown schedule, or a decay without `total_steps`.

    >>> spec = LearningRateSpec("cosine", warmup_steps=2, min_ratio=0.1, total_steps=10)
    >>> [round(learning_rate_at(step, spec, 1.0), 3) for step in (0, 1, 2, 6, 10, 99)]
    [0.5, 1.0, 1.0, 0.55, 0.1, 0.1]
    >>> line = LearningRateSpec("linear", warmup_steps=0, min_ratio=0.0, total_steps=4)
    >>> [learning_rate_at(step, line, 1.0) for step in range(5)]
    [1.0, 0.75, 0.5, 0.25, 0.0]
    >>> learning_rate_at(7, LearningRateSpec("constant"), 3e-4)
    0.0003
    """
    _check_word("learning_rate.schedule", spec.schedule, SCHEDULES)
    if step < spec.warmup_steps:
        return peak * (step + 1) / spec.warmup_steps
    if spec.schedule == "constant":
        return peak
    if spec.total_steps < 1:
        rule, advice = (
            f"the schedule {spec.schedule} falls until then",
            "Set the number of optimizer steps, or learning_rate.schedule=constant",
        )
        raise ConfigError(message("learning_rate.total_steps", spec.total_steps, rule, "", advice))
    progress = min(1.0, (step - spec.warmup_steps) / max(1, spec.total_steps - spec.warmup_steps))
    left = (1 + math.cos(math.pi * progress)) / 2 if spec.schedule == "cosine" else 1 - progress
    return peak * (spec.min_ratio + (1 - spec.min_ratio) * left)


def _check_word(key: str, word: str, known: tuple[str, ...]) -> None:
    if word not in known:
        raise ConfigError(message(key, word, "there is none of this name", "", did_you_mean(word, known)))
