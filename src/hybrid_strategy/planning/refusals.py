"""From a refusal to the error that a user sees."""

from __future__ import annotations

from collections.abc import Mapping

from hybrid_strategy.errors import ConfigError, LayoutError, did_you_mean, message
from hybrid_strategy.spec.schedule import Refusal

CHECKPOINT_WHEN_BUSY, CHECKPOINT_ERROR = ("wait", "skip"), ("raise", "warn")
"""What a save does while another is being written, and what one that fails does to the run."""

LARGEST_SEED, LARGEST_SIZE = 2**32 - 1, 10_000_000

REDUCE_DTYPES = {"float32": 4, "bfloat16": 2}
"""In which gradients may be summed over data-parallel ranks, with the bytes of one."""


def raise_if(refusal: Refusal | None) -> None:
    """Raise `LayoutError` for a refusal, in the one shape of every message; None passes."""
    if refusal:
        raise LayoutError(message(*refusal))


def check_whole(sizes: Mapping[str, object]) -> None:
    """Refuse every size that is no whole number of 1 or more, and those that no machine will ever have."""
    for key, size in sizes.items():
        also = ", or auto" if key == "data_parallel_size" else ""
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise LayoutError(message(key, size, "it must be a whole number of 1 or more", "", f"Set 1 or more{also}"))
        if size > LARGEST_SIZE:
            rule, advice = f"sizes go up to {LARGEST_SIZE:,}", f"Set 1 to {LARGEST_SIZE}{also}"
            raise LayoutError(message(key, size, rule, "", advice))


def check_switch(key: str, value: object) -> None:
    """Refuses what is neither true nor false."""
    if not isinstance(value, bool):
        raise ConfigError(message(key, value, "it must be true or false", "", "Set true or false"))


def check_when_busy(way: str, asynchronous: bool) -> None:
    """Refuses `skip` where every checkpoint is finished before the next one comes."""
    if way == "skip" and not asynchronous:
        rule = "it leaves out checkpoints that come while another is being written in the background, and would be ignored"
        numbers, advice = "asynchronous_checkpoint is False", "Set wait, or asynchronous_checkpoint=true"
        raise ConfigError(message("checkpoint_when_busy", way, rule, numbers, advice))


def check_reduce_dtype(name: object) -> None:
    """Refuses a type in which gradients cannot be summed; None is the gradients' own type.

    Raises:
        ConfigError: the type is not known, or sums in it overflow.
    """
    if name is None or name in REDUCE_DTYPES:
        return
    if name in ("float16", "half", "16"):
        rule, numbers = "a sum of gradients overflows in it", "its largest number is 65504 and its smallest 6e-8"
        raise ConfigError(message("reduce_dtype", name, rule, numbers, "Set bfloat16, which has the range of float32"))
    advice = did_you_mean(str(name), REDUCE_DTYPES)
    raise ConfigError(message("reduce_dtype", name, "gradients are not summed in such a type", "", advice))
