"""From the overrides of a sweep to the overrides of its points: products of values, and sets that go together."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, ValueType
from hydra.errors import HydraException, OverrideParseException

from hybrid_strategy.config.messages import Shown, unreadable
from hybrid_strategy.config.overrides import checked
from hybrid_strategy.errors import ConfigError, message
from hybrid_strategy.sweeping.settings import checked_settings

Overrides = tuple[str, ...]

_BEFORE_QUOTE = re.compile(r'(\\*)("|$)')


@dataclass(frozen=True)
class Choice:
    """One key of a sweep with the overrides that it may take; one of them where it does not vary."""

    key: str
    overrides: Overrides
    values: tuple[Any, ...]


def choices_of(params: Mapping[str, Any], arguments: Sequence[str], loader: Any = None) -> list[Choice]:
    """What the sweep says of each key; the command line wins over the parameters of the sweep's file.

    Args:
        params: key -> values as they would be typed, e.g. `1,2,4`.
        arguments: the command line, as Hydra hands it over.
        loader: Hydra's loader of configurations, which `glob(*)` asks for the options of a group; None: it has no values yet.

    Raises:
        ConfigError: a value that cannot be read, or a sweep without an end.
    """
    typed = [f"{key}={_typed(value)}" for key, value in params.items()]
    found: dict[str, Choice] = {}
    for text in (*checked_settings(checked(typed)), *arguments):
        made = _choice(_parse(text, loader), text)
        found.pop(made.key, None)
        found[made.key] = made
    return list(found.values())


def _typed(value: Any) -> str:
    """A value of a YAML file as the command line has it; text stands as it is, so that `1,2` is a sweep."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)


def _parse(text: str, loader: Any) -> Override:
    try:
        override: Override = OverridesParser.create(config_loader=loader).parse_overrides([text])[0]
    except OverrideParseException as error:
        raise unreadable(text) from error
    return override


def _choice(override: Override, text: str) -> Choice:
    key = override.key_or_group if override.package is None else f"{override.key_or_group}@{override.package}"
    if not override.is_sweep_override():
        value = None if override.is_delete() else override.value()
        return Choice(key, (text,), (value,))
    if not override.is_discrete_sweep():
        rule = "an interval has no end of values"
        raise ConfigError(message(key, Shown(_value_text(text)), rule, "", f"Set {key}=<value>,<value>"))
    if override.value_type == ValueType.GLOB_CHOICE_SWEEP and override.config_loader is None:
        return Choice(key, (), ())
    element = override.get_key_element()
    try:
        overrides = tuple(f"{element}={value}" for value in override.sweep_string_iterator())
        values = tuple(override.sweep_iterator())
    except HydraException as error:
        raise ConfigError(message(key, Shown(_value_text(text)), str(error), "", "")) from error
    if not overrides:
        raise ConfigError(message(key, Shown("empty"), "a sweep needs a value", "", f"Set {key}=<value>,<value>"))
    return Choice(key, overrides, values)


def _value_text(text: str) -> str:
    return text.partition("=")[2]


def every(choices: Sequence[Choice]) -> list[Overrides]:
    """All combinations, the last key varying fastest; each once."""
    return list(dict.fromkeys(product(*(each.overrides for each in choices))))


def sets_of(points: Sequence[Any], choices: Sequence[Choice]) -> list[list[str]]:
    """The sets of keys of a sweep's file, without the keys that the command line or the parameters name.

    Raises:
        ConfigError: a set that is no mapping, or a key that does not exist.
    """
    named = {each.key for each in choices}
    sets = []
    for index, point in enumerate(points):
        if not isinstance(point, Mapping):
            rule = "each point is a mapping of keys to values"
            raise ConfigError(message(f"hydra.sweeper.points[{index}]", point, rule, "", "Set {key: value, ...}"))
        kept = [f"{key}={_literal(value)}" for key, value in point.items() if str(key) not in named]
        sets.append(list(checked_settings(checked(kept))))
    return [list(each) for each in dict.fromkeys(tuple(each) for each in sets)] or [[]]


def _literal(value: Any) -> str:
    """One value of a YAML file in Hydra's grammar: text is text, whatever it holds.

    >>> print(_literal("a b"), _literal(["x", 1]), _literal({"k": None}), _literal("1e3"))
    "a b" [x,1] {k:null} "1e3"
    """
    if value is None or isinstance(value, (bool, int, float)):
        return _typed(value)
    if isinstance(value, (list, tuple)):
        return f"[{','.join(_literal(each) for each in value)}]"
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{key}:{_literal(each)}' for key, each in value.items())}}}"
    text = str(value)
    if text.replace("_", "").replace("-", "").replace(".", "").replace("/", "").isalnum() and not _reads_as_other(text):
        return text
    # a backslash is itself, except before a quote, the last one included
    escaped = _BEFORE_QUOTE.sub(lambda found: found[1] * 2 + ("\\" if found[2] else "") + found[2], text)
    return f'"{escaped}"'


def _reads_as_other(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return text.lower() in ("true", "false", "null", "none", "inf", "nan")
    return True
