"""What a step keeps on its module by hand, for hooks to read: lists that it appends to, attributes that it sets.

Under a pipeline a step ends on the last stage only, so what it keeps would be there only: an `on_validation_epoch_end` that
stacks such a list would find it empty on the other ranks. So all pipeline ranks get what the last stage has kept. Micro-batches
append one after the other; what those of padding keep does not count.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import lightning.pytorch as pl
import numpy
from torch import Tensor

from hybrid_strategy.parallel.trees import map_tensors
from hybrid_strategy.strategy.step_call import finished

_Path = tuple[Any, ...]
"""An attribute, and keys within its value."""
_OF_LIGHTNING = frozenset(vars(pl.LightningModule()))
_LOOKED_INTO = 64
"""Entries of a dict or a list of lists that are looked at: one a loader or a kind of value, not one a sample."""
_PLAIN = (Tensor, numpy.ndarray, numpy.generic, bool, int, float, complex, str, bytes, type(None))


@dataclass
class Kept:
    """What the steps of one batch have kept: new entries of lists, and attributes or entries of dicts that were set."""

    lists: dict[_Path, list[Any]] = field(default_factory=dict)
    values: dict[_Path, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class _Before:
    lists: dict[_Path, tuple[list[Any], int]]
    values: dict[_Path, tuple[Any, int]]

    def tensors(self) -> Iterator[Tensor]:
        """Tensors that a step may write into."""
        return (value.detach() for value, _ in self.values.values() if isinstance(value, Tensor))

    @staticmethod
    def of(module: pl.LightningModule) -> _Before:
        own = {name: value for name, value in vars(module).items() if name not in _OF_LIGHTNING}
        lists = {path: (each, len(each)) for path, each in _lists(own)}
        return _Before(lists, {path: (value, _version(value)) for path, value in _values(own)})


_NOTHING = _Before({}, {})


class Keeping:
    """Follows what the steps of one module keep on it.

    Args:
        module: the user's module.
        shares: do other ranks wait for what is kept on the last stage?
    """

    def __init__(self, module: pl.LightningModule, shares: bool) -> None:
        self._module, self._shares = module, shares
        self._before = _NOTHING

    def begin(self) -> None:
        """The steps of a batch begin."""
        self._before = _Before.of(self._module) if self._shares else _NOTHING

    @contextmanager
    def following(self, counts: bool) -> Iterator[None]:
        """Around one call of the step. Where it does not end lists stay as they are; all does where it does not count."""
        before = None if counts and not self._shares else _Before.of(self._module)
        written = [] if counts or before is None else [(each, each.clone()) for each in before.tensors()]
        ended = False
        try:
            yield
            ended = True
        finally:
            if before is not None and not (ended and counts):
                for each, length in before.lists.values():
                    del each[length:]
            if before is not None and not counts:
                self._put_back(before, written)

    def _put_back(self, before: _Before, written: list[tuple[Tensor, Tensor]]) -> None:
        for path, (value, _) in before.values.items():
            self._holder(path)[path[-1]] = value
        for tensor, content in written:
            tensor.copy_(content)

    def kept(self) -> Kept:
        """What the steps of this batch have kept here, as far as it can be sent to other ranks."""
        before, now, found = self._before, _Before.of(self._module), Kept()
        self._before = _NOTHING  # what it holds may have a graph behind it
        for path, (each, length) in now.lists.items():
            known, start = before.lists.get(path, (each, 0))
            if path[:1] in before.values and each is known and length > start and _is_plain(each[start:]):
                found.lists[path] = map_tensors(finished, each[start:])
        for path, (value, version) in now.values.items():
            known, at = before.values.get(path, (_Before, 0))
            if not (value is known and version == at) and path not in found.lists and _is_plain(value):
                found.values[path] = map_tensors(finished, value)
        return found

    def put(self, kept: Kept) -> None:
        """What the last stage has kept, on a rank that does not hold it."""
        self._before = _NOTHING
        for path, value in kept.values.items():
            self._holder(path)[path[-1]] = value
        for path, entries in kept.lists.items():
            self._holder((*path, 0)).extend(entries)

    def _holder(self, path: _Path) -> Any:
        """What holds the value at `path`: the module's attributes, a dict, a list."""
        holder: Any = vars(self._module)
        for key in path[:-1]:
            holder = holder.setdefault(key, []) if isinstance(holder, dict) else holder[key]
        return holder


def _values(own: Mapping[str, Any]) -> Iterator[tuple[_Path, Any]]:
    """Attributes, and the entries of those that are dicts; lists in them are followed by their entries."""
    for name, value in own.items():
        yield (name,), value
        if isinstance(value, dict):
            yield from (((name, key), each) for key, each in islice(value.items(), _LOOKED_INTO) if type(each) is not list)


def _lists(holder: Mapping[Any, Any]) -> Iterator[tuple[_Path, list[Any]]]:
    """The lists in `holder`, also those in its dicts and in lists of lists."""
    todo: list[tuple[_Path, Any]] = [((key,), value) for key, value in holder.items()]
    while todo:
        path, value = todo.pop()
        if type(value) is list:
            yield path, value
        if isinstance(value, dict):
            todo += [((*path, key), each) for key, each in islice(value.items(), _LOOKED_INTO) if type(each) in (list, dict)]
        elif type(value) is list and value and type(value[0]) is list:
            todo += [((*path, index), each) for index, each in enumerate(value[:_LOOKED_INTO]) if type(each) is list]


def _version(value: Any) -> int:
    return value._version if isinstance(value, Tensor) and not value.is_inference() else 0


def _is_plain(value: Any) -> bool:
    """May it be sent to other ranks?"""
    if isinstance(value, dict):
        return all(isinstance(key, _PLAIN) for key in value) and all(map(_is_plain, value.values()))
    return all(map(_is_plain, value)) if type(value) in (list, tuple) else isinstance(value, _PLAIN)
