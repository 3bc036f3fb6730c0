"""Finds a part by folder and name. The only dynamic import of the package.

A part is one file in a folder such as `schedules/` or `parallel/sharding/`: a module with an object `PART` that has a `name`.
Files whose name starts with an underscore are helpers, not parts. Other packages add parts through the entry-point group
`hybrid_strategy.<folder>` (dots for slashes), each entry point being such a `PART`.
"""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from hybrid_strategy.errors import ConfigError, did_you_mean, message


@cache
def parts(folder: str) -> dict[str, Any]:
    """All parts of `folder` (e.g. `"schedules"`, `"parallel.sharding"`) by their own name."""
    package = importlib.import_module(f"hybrid_strategy.{folder}")
    found: dict[str, Any] = {}
    for info in sorted(pkgutil.iter_modules(package.__path__), key=lambda each: each.name):
        if not info.name.startswith("_"):
            part = importlib.import_module(f"{package.__name__}.{info.name}").PART
            found[part.name] = part
    for entry in entry_points(group=f"hybrid_strategy.{folder}"):
        part = entry.load()
        found.setdefault(part.name, part)
    return found


def names(folder: str) -> list[str]:
    """Names of the parts of `folder`, without importing them: a part of ours has the name of its file."""
    package = Path(__file__).parent.joinpath(*folder.split("."))
    files = sorted(info.name for info in pkgutil.iter_modules([str(package)]) if not info.name.startswith("_"))
    return [*files, *(entry.name for entry in entry_points(group=f"hybrid_strategy.{folder}"))]


def find(folder: str, name: str, key: str) -> Any:
    """The part called `name`, in any case; `key` is the setting it was asked for by.

    Raises:
        ConfigError: there is no such part; the message lists those there are.
    """
    known = parts(folder)
    if name in known:
        return known[name]
    for each, part in known.items():
        if each.lower() == str(name).lower():
            return part
    raise ConfigError(message(key, name, "there is no part of this name", "", did_you_mean(str(name), known)))
