"""From a refusal to the error that a user sees."""

from __future__ import annotations

from collections.abc import Mapping

from hybrid_strategy.errors import LayoutError, message
from hybrid_strategy.spec.schedule import Refusal


def raise_if(refusal: Refusal | None) -> None:
    """Raise `LayoutError` for a refusal, in the one shape of every message; None passes."""
    if refusal:
        raise LayoutError(message(*refusal))


def check_whole(sizes: Mapping[str, object]) -> None:
    """Refuse every size that is no whole number of 1 or more."""
    for key, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            also = ", or auto" if key == "data_parallel_size" else ""
            raise LayoutError(message(key, size, "it must be a whole number of 1 or more", "", f"Set 1 or more{also}"))
