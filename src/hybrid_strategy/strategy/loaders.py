"""Loaders that the Trainer got in a collection: one after another, or read together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def brought(loaders: Any, batch: Any) -> Iterator[tuple[Any, Any]]:
    """Each loader of a collection, in Lightning's order, and what it has brought to `batch` where all are read together.

    >>> list(brought({"a": "one", "b": ["two", "three"]}, {"a": 1, "b": [None, 3]}))
    [('one', 1), ('two', None), ('three', 3)]
    """
    if isinstance(loaders, Mapping):
        for key, loader in loaders.items():
            yield from brought(loader, batch.get(key) if isinstance(batch, Mapping) else None)
    elif isinstance(loaders, (list, tuple)):
        parts = batch if isinstance(batch, (list, tuple)) and len(batch) == len(loaders) else [None] * len(loaders)
        for loader, part in zip(loaders, parts, strict=True):
            yield from brought(loader, part)
    else:
        yield loaders, batch
