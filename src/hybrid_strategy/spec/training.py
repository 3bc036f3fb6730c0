"""Optimizer and learning-rate settings as plain data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class OptimizerSpec:
    """`name` is `adamw` or `sgd`; `weight_decay` falls on matrices only (parameters of two or more dimensions)."""

    name: str = "adamw"
    learning_rate: float = 3e-4
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    momentum: float = 0.0
    weight_decay: float = 0.1
    foreach: bool | None = None
    fused: bool | None = None


@dataclass(frozen=True)
class LearningRateSpec:
    """Warm-up and decay. `scaling` multiplies the base rate by (global batch / base batch) to a power.

    `scaling`: `none`, `linear`, `sqrt`, `power` (with `exponent`) or `auto` (linear for SGD, sqrt for Adam; arXiv:2205.10287),
    which without a base batch leaves the rate as it is. `warmup_tokens` is a warm-up in tokens, instead of `warmup_steps`.
    """

    schedule: str = "cosine"
    warmup_steps: int = 0
    min_ratio: float = 0.1
    total_steps: int = 0
    scaling: str = "auto"
    exponent: float = 0.5
    base_batch_size: int = 0
    warmup_tokens: int = 0
