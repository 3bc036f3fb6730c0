"""Text that is too short to be trained on: found before any process is started, where looking takes no longer than that."""

from __future__ import annotations

from hybrid_strategy.config.settings import RunConfig
from hybrid_strategy.config.targets import TEXT_DATA, text_data_arguments
from hybrid_strategy.errors import DataError, message
from hybrid_strategy.units import format_count


def check_length(config: RunConfig) -> None:
    """Refuses text whose training or validation part does not fill one sequence.

    Bytes do not tell: a line of one letter may become a handful of tokens. So text that is small or has been prepared before is
    looked at; of larger text a rank says the same, once it is prepared. The standard library as a whole is long enough.

    Raises:
        DataError: it does not.
    """
    given = text_data_arguments(config, 1) if config.data.get("_target_") == TEXT_DATA else {}
    names = ("vocab_size", "sequence_length")
    if not all(name in given for name in names) or not (given["files"] or given["max_bytes"] is not None):
        return
    from hybrid_strategy.data.prepare import TextSpec, prepared_or_small

    folder = {"cache_dir": given["cache_dir"]}
    spec = TextSpec(tuple(given["files"]), given["vocab_size"], given["validation_fraction"], given["max_bytes"], **folder)
    prepared = prepared_or_small(spec)
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
