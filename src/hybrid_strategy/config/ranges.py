"""Which values a key may have, where its type alone does not say: refused by the full key, before anything is planned."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hybrid_strategy.errors import ConfigError, message
from hybrid_strategy.planning.refusals import CHECKPOINT_ERROR, CHECKPOINT_WHEN_BUSY, LARGEST_SEED, LARGEST_SIZE

_BACKENDS = ("gloo", "nccl", "ucc", "mpi", "xccl")
_TIME = re.compile(r"\d+:\d{1,2}:\d{1,2}:\d{1,2}")


@dataclass(frozen=True)
class Range:
    """`allows` is asked of values that are not null; `rule` and `advice` are those of the error."""

    allows: Callable[[Any], bool]
    rule: str
    advice: str


def _from(least: float, rule: str = "") -> Range:
    return Range(lambda value: least <= value < math.inf, rule or f"it must be {least:g} or more", f"Set {least:g} or more")


def _above(bound: float) -> Range:
    return Range(lambda value: bound < value < math.inf, f"it must be more than {bound:g}", f"Set more than {bound:g}")


def _within(least: float, most: float) -> Range:
    return Range(lambda value: least <= value <= most, f"it must be {least:,} to {most:,}", f"Set {least:,} to {most:,}")


def _one_of(*words: str) -> Range:
    return Range(lambda value: value in words, "there is no such way", f"Set {', '.join(words[:-1])} or {words[-1]}")


def _backend(value: str) -> bool:
    return all(part.split(":")[-1] in _BACKENDS for part in value.split(","))


_SEED = Range(lambda value: 0 <= value <= LARGEST_SEED, f"a seed is a whole number of 0 to {LARGEST_SEED}", "Set such a number")
_SHARE = Range(
    lambda value: 0 <= value <= 1 if isinstance(value, float) else value >= 0,
    "it is a number of batches, or with a decimal point a share of all",
    "Set 0 or more batches, or 0.0 to 1.0",
)
_INTERVAL = Range(
    lambda value: 0 < value <= 1 if isinstance(value, float) else value >= 1,
    "it is a number of batches, or with a decimal point a share of an epoch",
    "Set 1 or more batches, or a share above 0.0 up to 1.0",
)
_BETAS = Range(
    lambda value: len(value) == 2 and all(0 <= each < 1 for each in value),
    "AdamW has two, each of 0 up to but not 1",
    "Set such as [0.9,0.95]",
)
_UNLIMITED = _from(-1, "it must be 0 or more, or -1 for no limit")
_NAMED = Range(lambda value: bool(value.strip()), "it is empty", "Set a path, or leave it out")
_NAME = Range(lambda value: bool(value.strip(". ")), "it names the folder of the run", "Set a name, or leave it out")
_EXACT = Range(lambda value: value in (True, False, "warn"), "there is no such way", "Set true, false or warn")
_MODE = _one_of("min", "max")
_SIZE = Range(
    lambda value: not isinstance(value, int) or 0 < value <= LARGEST_SIZE,
    f"it must be a whole number of 1 to {LARGEST_SIZE:,}",
    "Set a number of this range",
)
_LAYERS = _within(1, 100_000)

RANGES: Mapping[str, Range] = {
    "name": _NAME,
    "seed": _SEED,
    "strategy.seed": _SEED,
    **{f"strategy.{each}_size": _SIZE for each in ("data_parallel", "tensor_parallel", "pipeline_parallel", "context_parallel")},
    "strategy.data_parallel_replicate_size": _SIZE,
    "strategy.stages_per_rank": _SIZE,
    "strategy.num_microbatches": _SIZE,
    "strategy.micro_batch_size": _SIZE,
    "strategy.timeout": _above(0),
    "strategy.checkpoint_when_busy": _one_of(*CHECKPOINT_WHEN_BUSY),
    "strategy.checkpoint_error": _one_of(*CHECKPOINT_ERROR),
    "strategy.process_group_backend": Range(_backend, "torch has no such backend", "Set gloo, nccl or cpu:gloo,cuda:nccl"),
    "strategy.parallel_plan": Range(
        lambda value: isinstance(value, Mapping), "it is a mapping", "Set {units: [...], tensor: {...}}"
    ),
    "optimizer.betas": _BETAS,
    "optimizer.eps": _from(0),
    "optimizer.learning_rate": _from(0),
    "optimizer.momentum": _from(0),
    "optimizer.weight_decay": _from(0),
    "learning_rate.min_ratio": _within(0, 1),
    "learning_rate.warmup_steps": _from(0),
    "learning_rate.warmup_tokens": _from(0),
    "learning_rate.total_steps": _from(0),
    "learning_rate.base_batch_size": _from(0),
    "trainer.max_epochs": _UNLIMITED,
    "trainer.min_epochs": _from(0),
    "trainer.max_steps": _UNLIMITED,
    "trainer.min_steps": _from(0),
    "trainer.max_time": Range(
        lambda value: _TIME.fullmatch(value) is not None, "it is days:hours:minutes:seconds", "Set such as 00:12:00:00"
    ),
    "trainer.fast_dev_run": _from(0),
    "trainer.overfit_batches": _SHARE,
    "trainer.limit_train_batches": _SHARE,
    "trainer.limit_val_batches": _SHARE,
    "trainer.limit_test_batches": _SHARE,
    "trainer.limit_predict_batches": _SHARE,
    "trainer.val_check_interval": _INTERVAL,
    "trainer.check_val_every_n_epoch": _from(1),
    "trainer.num_sanity_val_steps": _from(-1),
    "trainer.log_every_n_steps": _from(0),
    "trainer.accumulate_grad_batches": _from(1),
    "trainer.deterministic": _EXACT,
    "trainer.gradient_clip_val": _from(0),
    "trainer.gradient_clip_algorithm": _one_of("norm", "value"),
    "trainer.reload_dataloaders_every_n_epochs": _from(0),
    "data.num_workers": _from(0),
    "data.max_bytes": _from(1),
    "resume": _NAMED,
    "paths.output_dir": _NAMED,
    "paths.cache_dir": _NAMED,
}
"""Full key -> what it may be."""

ENTRIES: Mapping[str, Mapping[str, Range]] = {
    "LanguageModel": {
        **dict.fromkeys(("hidden_size", "intermediate_size", "vocab_size", "sequence_length"), _within(1, 100 * LARGEST_SIZE)),
        **dict.fromkeys(("num_layers", "num_attention_heads"), _LAYERS),
        **dict.fromkeys(("num_key_value_heads", "head_dim"), _within(0, 100_000)),
    },
    "ModelCheckpoint": {
        "mode": _MODE,
        "save_top_k": _from(-1),
        "every_n_train_steps": _from(0),
        "every_n_epochs": _from(0),
    },
    "EarlyStopping": {"mode": _MODE, "patience": _from(0)},
    "LearningRateMonitor": {"logging_interval": _one_of("step", "epoch")},
    "Throughput": {"window_steps": _from(1)},
    "ProgressLine": {"refresh_seconds": _from(0), "plain_seconds": _from(0)},
    "CSVLogger": {"flush_logs_every_n_steps": _from(1)},
    "WandbRunLogger": {
        "mode": _one_of("auto", "online", "offline", "disabled"),
        "init_timeout": _above(0),
        "finish_timeout": _above(0),
    },
}
"""Class of a model, callback or logger that is shipped -> its keys."""


def check_ranges(groups: Mapping[str, Any]) -> None:
    """Refuses the first value that is out of its range.

    Args:
        groups: plain containers by group, resolved and typed.

    Raises:
        ConfigError: a value that cannot be meant.
    """
    for key, allowed in RANGES.items():
        group, _, name = key.partition(".")
        values = groups.get(group)
        _check(key, values.get(name) if isinstance(values, Mapping) else None if name else values, allowed)
    entries = {f"{group}.{name}": entry for group in ("callbacks", "logger") for name, entry in (groups.get(group) or {}).items()}
    for path, entry in {"model": groups.get("model"), **entries}.items():
        kind = str(entry.get("_target_")).rpartition(".")[2] if isinstance(entry, Mapping) else ""
        for name, allowed in ENTRIES.get(kind, {}).items():
            _check(f"{path}.{name}", entry.get(name), allowed)


def _check(key: str, value: Any, allowed: Range) -> None:
    if value is not None and not allowed.allows(value):
        endless = isinstance(value, float) and not math.isfinite(value)
        raise ConfigError(message(key, value, "it must be a finite number" if endless else allowed.rule, "", allowed.advice))
