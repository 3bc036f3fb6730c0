"""Text that is too short to be trained on: found before any process is started, where looking takes no longer than that."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hybrid_strategy.config.settings import RunConfig
from hybrid_strategy.config.targets import TEXT_DATA, text_data_arguments
from hybrid_strategy.errors import ConfigError, DataError, message
from hybrid_strategy.units import format_count

if TYPE_CHECKING:
    from hybrid_strategy.data.prepare import PreparedText


def check_length(config: RunConfig) -> None:
    """Refuses text whose training or validation part does not fill one sequence.

    Bytes do not tell: a line of one letter may become a handful of tokens. So text that is small or has been prepared before is
    looked at; of larger text a rank says the same, once it is prepared. The standard library as a whole is long enough.

    Raises:
        DataError: it does not.
    """
    given = _given(config)
    if given["files"] or given["max_bytes"] is not None:
        _check_parts(config, given)


def check_validation_interval(config: RunConfig, rows: int) -> None:
    """Refuses validation after more batches than an epoch has, of which Lightning's loops tell only when all ranks run.

    Args:
        rows: sequences of one batch of all data-parallel ranks; 0: not known.

    Raises:
        ConfigError: it would never come.
    """
    trainer, interval = config.trainer, config.trainer.val_check_interval
    counted = isinstance(interval, int) and not isinstance(interval, bool) and trainer.check_val_every_n_epoch is not None
    if not counted or trainer.fast_dev_run:
        return
    share = trainer.overfit_batches or trainer.limit_train_batches
    prepared = _prepared(_given(config)) if rows else None
    batches = None if prepared is None else -(-((prepared.train_tokens - 1) // _given(config)["sequence_length"]) // rows)
    if isinstance(share, int):
        batches = share if batches is None else min(share, batches)
    elif share is not None and batches is not None:
        batches = int(batches * share)
    if batches and interval > batches:
        rule = "validation would come after more batches than an epoch has"
        advice = f"Set {batches} or less, or trainer.check_val_every_n_epoch=null to count over all epochs"
        raise ConfigError(message("trainer.val_check_interval", interval, rule, f"It has {batches}", advice))


def _given(config: RunConfig) -> dict[str, Any]:
    """What the text is made of; without files and limit for other data."""
    given = text_data_arguments(config, 1) if config.data.get("_target_") == TEXT_DATA else {}
    return given if "vocab_size" in given and "sequence_length" in given else {"files": (), "max_bytes": None}


def _prepared(given: dict[str, Any]) -> PreparedText | None:
    """Its numbers of tokens, where they are known or take no longer than a moment."""
    if "vocab_size" not in given:
        return None
    from hybrid_strategy.data.prepare import TextSpec, prepared_or_small

    folder = {"cache_dir": given["cache_dir"]}
    spec = TextSpec(tuple(given["files"]), given["vocab_size"], given["validation_fraction"], given["max_bytes"], **folder)
    return prepared_or_small(spec)


def _check_parts(config: RunConfig, given: dict[str, Any]) -> None:
    prepared = _prepared(given)
    if prepared is None:
        return
    for part, tokens in (("training", prepared.train_tokens), ("validation", prepared.validation_tokens)):
        if tokens <= given["sequence_length"]:
            raise _too_short(config, given["sequence_length"], part, tokens)


def _too_short(config: RunConfig, length: int, part: str, tokens: int) -> DataError:
    key = "model.sequence_length" if config.data.get("sequence_length") is None else "data.sequence_length"
    rule = f"the text that is kept for {part} must have more tokens than a sequence"
    share = " or a larger data.validation_fraction," if part == "validation" else ""
    shorter = f" or data.sequence_length={tokens - 1} or less" if tokens > 1 else ""
    numbers = f"It has {format_count(tokens)} tokens"
    return DataError(message(key, length, rule, numbers, f"Give more text,{share}{shorter}".rstrip(",")))
