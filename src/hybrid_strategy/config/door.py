"""From frozen dataclasses to the plain ones that OmegaConf needs, and from its plain containers back to frozen ones.

OmegaConf refuses overrides below a frozen dataclass and knows neither tuples nor Mappings. One source of truth, two sides.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import MISSING, asdict, field, fields, is_dataclass, make_dataclass
from functools import cache
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

T = TypeVar("T")

_WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    type(None): "null",
    dict: "a mapping",
    list: "a list",
}


@cache
def door(kind: type, open_fields: tuple[str, ...] = ()) -> type:
    """A plain dataclass with the fields and defaults of the frozen one, below it as well; `open_fields` take any mapping."""
    hints = get_type_hints(kind)
    made: list[Any] = []
    for each in fields(kind):
        if each.name in open_fields:
            made.append((each.name, dict[str, Any], field(default_factory=dict)))
        else:
            hint = _door_type(hints[each.name])
            made.append((each.name, hint, _default(each, hint)))
    return make_dataclass(kind.__name__, made)


def _door_type(hint: Any) -> Any:
    origin, arguments = get_origin(hint), get_args(hint)
    if is_dataclass(hint):
        return door(cast(type, hint))
    if origin in (Union, types.UnionType):
        return Union[tuple(_door_type(each) for each in arguments)]  # noqa: UP007  (OmegaConf reads typing's form)
    if origin is tuple:
        return list[arguments[0]]  # type: ignore[valid-type]
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return dict[str, Any]
    return hint


def _default(each: Any, hint: Any) -> Any:
    if each.default is MISSING and each.default_factory is MISSING:
        return field(default="???")  # OmegaConf's word for a value that must be given
    value = each.default if each.default is not MISSING else each.default_factory()
    if is_dataclass(hint):
        plain = asdict(value)
        return field(default_factory=lambda: cast(type, hint)(**plain))
    if get_origin(hint) in (list, dict):
        container = get_origin(hint)
        return field(default_factory=lambda: container(value))
    return field(default=value)


def from_plain(kind: type[T], values: Mapping[str, Any]) -> T:
    """The frozen dataclass from OmegaConf's plain container, which the door has already checked."""
    hints = get_type_hints(kind)
    return kind(**{key: _restore(hints[key], value) for key, value in values.items()})


def _restore(hint: Any, value: Any) -> Any:
    if is_dataclass(hint) and isinstance(value, Mapping):
        return from_plain(cast(type, hint), value)
    if isinstance(value, list) and any(get_origin(each) is tuple for each in (hint, *get_args(hint))):
        return tuple(value)
    return value


def known_keys(kind: type, path: str) -> tuple[str, list[str]] | None:
    """Where a dotted path leaves the fields of `kind`: the part that is unknown and the keys known there; None: it does not.

    Paths that go on below a field of any mapping are not judged.
    """
    hint: Any = kind
    parts = path.split(".")
    for depth, part in enumerate(parts):
        if not is_dataclass(hint):
            return None
        name, names = part.partition("[")[0], [each.name for each in fields(hint)]
        if name not in names:
            return ".".join([*parts[:depth], name]), names
        hint = _step(hint, part)
    return None


def describe(kind: type, path: str) -> str:
    """What the value at a dotted path must be, in words; empty where nothing is known of it.

    >>> from hybrid_strategy.config.settings import RunConfig
    >>> describe(RunConfig, "strategy.data_parallel_size"), describe(RunConfig, "optimizer.betas[1]")
    ('a whole number or text', 'a number')
    >>> describe(RunConfig, "strategy.stage_cuts[0]")
    'a whole number'
    """
    hint: Any = kind
    for part in path.split("."):
        if not is_dataclass(hint):
            return ""
        hint = _step(hint, part)
    kinds = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    words = [_WORDS.get(_container(each), "") for each in kinds]
    return " or ".join(word for word in words if word)


def _step(hint: Any, part: str) -> Any:
    """The type of the field `name`, or of an element of it for `name[0]`."""
    name, bracket, _ = part.partition("[")
    found = get_type_hints(hint).get(name)
    lists = (each for each in (found, *get_args(found)) if get_origin(each) is tuple)
    return get_args(next(lists, found))[0] if bracket and get_args(found) else found


def _container(hint: Any) -> Any:
    origin = get_origin(hint)
    if origin is tuple:
        return list
    return dict if is_dataclass(hint) or (isinstance(origin, type) and issubclass(origin, Mapping)) else origin or hint
