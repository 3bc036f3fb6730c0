"""Text that must not be resolved again: what is resolved once may well contain `${`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_OPENING = re.compile(r"(\\*)\$\{")


def escape(value: Any) -> Any:
    r"""The value, in all its depth, written so that OmegaConf reads it back unchanged.

    >>> print(escape({"name": "a ${b} c"})["name"])
    a \${b} c
    """
    if isinstance(value, str):
        return _OPENING.sub(lambda found: f"{found[1]}{found[1]}\\${{", value)
    if isinstance(value, Mapping):
        return {key: escape(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [escape(each) for each in value]
    return value
