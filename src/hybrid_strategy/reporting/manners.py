"""What loggers of ours have in common: their troubles are a warning, and the run goes on without them."""

from __future__ import annotations

from typing import Any


class Nothing:
    """Takes every call and attribute."""

    def __getattr__(self, _: str) -> Nothing:
        return self

    def __call__(self, *_: Any, **__: Any) -> None:
        return None


def short(error: Exception) -> str:
    """The first line of an error, else its name."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
