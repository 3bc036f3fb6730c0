"""Keys, tokens and passwords stay out of files: what a run or a sweep writes is shown to others.

One rule for what is typed, what configuration files say and what launchers are told. A secret that is written down is refused;
one that is named, `${oc.env:NAME}`, stays a name in every file, and each rank reads the variable as it makes the object.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hybrid_strategy.config.messages import Shown
from hybrid_strategy.config.secret_words import (
    is_number_of_secret,
    is_secret_name,
    is_written_down,
    names_assigned,
    parts_of,
)
from hybrid_strategy.config.settings import OPEN_GROUPS
from hybrid_strategy.config.targets import BY_TARGET, LanguageModelSettings, TextDataSettings
from hybrid_strategy.errors import ConfigError, message

_VARIABLE = re.compile(r"(?:\w*_)?(?:KEY|TOKEN|SECRET|PASSWORD|PASSWD)", re.IGNORECASE)
"""The name of a variable of the environment that holds a secret."""

_REFERENCE = re.compile(r"(?<!\\)\$\{oc\.env:\s*([A-Za-z_]\w*)\s*(?:,\s*null\s*)?\}")
_READ = re.compile(r"oc\.env:\s*[\"']?([A-Za-z_]\w*)")
"""Any way to read a variable: with a default, or within another resolver, too."""
_NODE = re.compile(r"\$\{([\w.]+)\}")
_READ_BY = {
    "logger.wandb": "WANDB_API_KEY, which W&B reads itself",
    "logger.mlflow": "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, which MLflow reads, beside a URI without them",
}
_OF_VARIABLES = ("environment", "env_set")
"""Settings of launchers and of Hydra whose keys are variables."""

_OF_A_SWEEP = re.compile(r"hydra\.sweeper\.(?:params|points\[\d+\])\.(?=.)")
_OF_HYDRA = ("job.env_set", "job.name", "launcher", "sweeper", "run", "sweep")
"""What of Hydra's own settings is kept, in files of its own or of a launcher, whoever's that is, or names folders."""
_AS_WRITTEN = "job.env_set"
"""Kept with its interpolations; the others are resolved before they are used, and no name of a variable would be left."""
_READ_BY_RANKS = ("tracking_uri",)
"""Arguments of shipped objects that are for the object alone; the others name files and runs."""

_SHIPPED = tuple(each.name for kind in (LanguageModelSettings, TextDataSettings) for each in fields(kind))
"""Arguments that no rank would read from a variable."""

_LEAST_LENGTH = 6
"""A shorter text stands in others by chance."""


class _Leaf(NamedTuple):
    """A value that is no container. `word`: what stands before it, most often the last part of its key."""

    key: str
    value: Any
    word: str


_RULE = "a secret would stand in the files of the run, which are shown to others"


def holds_secret(word: str, value: object) -> bool:
    """Is a secret written down under this word? One that a variable holds is not.

    >>> [holds_secret(*each) for each in [("password", "x"), ("password", "${oc.env:PW}"), ("url", "http://u:pw@host")]]
    [True, False, True]
    """
    if isinstance(value, bool) or value is None:
        return False
    if not isinstance(value, str):
        return isinstance(value, (int, float)) and is_number_of_secret(word)
    text, references = _REFERENCE.subn("<>", value)
    return is_written_down("" if references else word, text)


def check_typed(overrides: Sequence[Override]) -> None:
    """The overrides of a command line or a sweep's file, which are kept as they are typed.

    Raises:
        ConfigError: one of them holds a secret.
    """
    for override in overrides:
        for value in _typed_values(override):
            for leaf in _leaves(value, override.key_or_group):
                text = str(leaf.value)
                if "${" not in text or _REFERENCE.search(text):  # of other interpolations more is known when composed
                    _refuse(leaf)


def _typed_values(override: Override) -> list[Any]:
    if override.is_delete():
        return []
    if not override.is_sweep_override():
        return [override.value()]
    try:
        return list(override.sweep_iterator()) if override.is_discrete_sweep() else []
    except (HydraException, ValueError):  # a glob, whose options no one has looked for yet
        return []


def check_settings(values: Mapping[str, Any], prefix: str) -> None:
    """The settings of a launcher, which stand in scripts and reports.

    Raises:
        ConfigError: one of them holds a secret.
    """
    for leaf in _leaves(values, prefix):
        _refuse(leaf)


def check_hydra(config: DictConfig) -> None:
    """Settings of Hydra's, wherever they were said.

    Raises:
        ConfigError: one of them holds a secret, or would.
    """
    held = _held(_plain(config))
    for path in _OF_HYDRA:
        key = f"hydra.{path}"
        for leaf in _leaves(_at(_plain(config), key), key):
            _refuse(leaf)
            if path != _AS_WRITTEN and any(map(_is_of_secret, _READ.findall(str(leaf.value)))):
                raise _refusal(leaf.key)
        for leaf in _leaves(_resolved(config, key.split(".")), key) if path != _AS_WRITTEN else ():
            _refuse(leaf)
            if any(secret in str(leaf.value) for secret in held):
                raise _refusal(leaf.key)


def _resolved(parent: Any, path: Sequence[Any]) -> Any:
    """The plain value at a path; nothing stands where something cannot be resolved, which is said where it is used."""
    try:
        found = parent[path[0]]
    except (OmegaConfBaseException, KeyError):
        return None
    if len(path) > 1:
        return _resolved(found, path[1:]) if isinstance(found, DictConfig) else None
    if isinstance(found, DictConfig):
        return {name: _resolved(found, [name]) for name in found}
    return [_resolved(found, [index]) for index in range(len(found))] if isinstance(found, ListConfig) else found


def _is_of_secret(variable: str) -> bool:
    return bool(_VARIABLE.fullmatch(variable)) or is_secret_name(variable)


def _plain(config: DictConfig) -> dict[Any, Any]:
    found = OmegaConf.to_container(config, resolve=False)
    assert isinstance(found, dict)
    return found


def without_secrets(config: DictConfig, values: Mapping[str, Any]) -> dict[str, Any]:
    """The resolved configuration, with names of variables in place of the secrets that they hold.

    Args:
        config: with its interpolations.
        values: the same, resolved.

    Raises:
        ConfigError: a secret is written down, or comes from somewhere that no rank can read it from.
    """
    raw = _plain(config)
    naming = _Naming(raw, _held(raw))
    return {key: naming.named(raw.get(key), _Leaf(key, value, key)) for key, value in values.items()}


def _held(raw: Mapping[str, Any]) -> dict[str, str]:
    """Secrets -> the variables that hold them, of all that the configuration reads, the longest first."""
    found = {}
    for leaf in _leaves(raw, ""):
        for variable in _READ.findall(str(leaf.value)):
            value = os.environ.get(variable, "")
            if len(value) >= _LEAST_LENGTH and (_is_of_secret(variable) or holds_secret(leaf.word, value)):
                found[value] = variable
    return dict(sorted(found.items(), key=lambda each: -len(each[0])))


@dataclass(frozen=True)
class _Naming:
    """Puts names of variables in place of secrets. `root`: the configuration with its interpolations."""

    root: Mapping[str, Any]
    held: Mapping[str, str]

    def named(self, raw: Any, part: _Leaf, inner: bool = False) -> Any:
        """The value for files, of a part or of a whole container.

        Args:
            raw: as it was written; None where a resolver has made it.
            inner: as of `parts_of`.
        """
        while isinstance(raw, str) and (found := _NODE.fullmatch(raw)):
            raw = _at(self.root, found[1])
        key, value, _ = part
        if isinstance(value, Mapping):
            below = raw if isinstance(raw, Mapping) else {}
            parts = parts_of(value, part.word)
            return {name: self.named(below.get(name), _Leaf(f"{key}.{name}", each, word)) for name, each, word in parts}
        if isinstance(value, list):
            items = raw if isinstance(raw, list) and len(raw) == len(value) else [None] * len(value)
            parts = parts_of(value, part.word, inner)
            return [self.named(items[index], _Leaf(f"{key}[{index}]", each, word), True) for index, each, word in parts]
        if isinstance(raw, str) and _REFERENCE.search(raw):
            return self._referred(raw, part)
        named = self._replaced(value) if isinstance(value, str) and (raw is None or "${" in str(raw)) else value
        _refuse(_Leaf(key, named, part.word))
        if named != value and not _is_made_by_ranks(self.root, key):
            raise _refusal(key, named=True)
        return named

    def _referred(self, raw: str, part: _Leaf) -> Any:
        held = any(_VARIABLE.fullmatch(each) or each in self.held.values() for each in _REFERENCE.findall(raw))
        if not (held or is_secret_name(part.word) or holds_secret(part.word, part.value)):
            return part.value
        _refuse(_Leaf(part.key, raw, part.word))  # a part of it may be written down
        made = _is_made_by_ranks(self.root, part.key)
        if "${" in _REFERENCE.sub("", raw) or not made:
            raise _refusal(part.key, named=not made)
        return raw

    def _replaced(self, value: str) -> str:
        """What has come by another node, a default, a resolver."""
        for secret, variable in self.held.items():
            value = value.replace(secret, f"${{oc.env:{variable}}}")
        return value


def _at(root: Mapping[str, Any], path: str) -> Any:
    found: Any = root
    for part in path.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


def _is_made_by_ranks(root: Mapping[str, Any], key: str) -> bool:
    """Is it an argument of an object that each rank makes by its `_target_`?"""
    group, _, rest = key.partition(".")
    owner = f"{group}.{rest.partition('.')[0]}" if group in ("callbacks", "logger") else group
    own = _at(root, f"{owner}._target_") not in BY_TARGET or _last(key) in _READ_BY_RANKS
    return group in OPEN_GROUPS and group != "cluster" and own


def read_variables(text: str, key: str) -> str | None:
    """The text with the values of the variables that it names; None where all of it is one that is not set.

    Raises:
        ConfigError: one that must be set is not.
    """
    whole = _REFERENCE.fullmatch(text)
    if whole is not None and "null" in text[whole.end(1) :]:
        return os.environ.get(whole[1])
    for name in _REFERENCE.findall(text):
        if name not in os.environ:
            raise ConfigError(message(key, Shown(text), f"there is no variable {name} here", "", f"Export {name}"))
    return _REFERENCE.sub(lambda found: os.environ[found[1]], text)


def _leaves(value: Any, key: str, word: str | None = None, inner: bool = False) -> Iterator[_Leaf]:
    word = _last(key) if word is None else word
    if isinstance(value, Mapping):
        for name, each, said in parts_of(value, word):
            yield from _leaves(each, f"{key}.{name}", said)
    elif isinstance(value, (list, tuple)):
        for index, each, said in parts_of(value, word, inner):
            yield from _leaves(each, f"{key}[{index}]", said, True)
    else:
        yield _Leaf(key, value, word)


def _last(key: str) -> str:
    return re.sub(r"(?:\[\d+\])+$", "", key).rpartition(".")[2]


def _refuse(leaf: _Leaf) -> None:
    key, value, word = leaf
    parts = key.split(".")
    variable = len(parts) > 1 and parts[-2] in _OF_VARIABLES and parts[0] == "hydra" and _VARIABLE.fullmatch(parts[-1])
    script = key.startswith("hydra.launcher.") and any(map(_VARIABLE.fullmatch, names_assigned(str(value))))
    if holds_secret(word, value) or script or (variable and value and not _REFERENCE.search(str(value))):
        raise _refusal(key)


def _refusal(key: str, named: bool = False) -> ConfigError:
    """`named`: by its variable, where it would be resolved all the same."""
    key, in_sweeper = _OF_A_SWEEP.subn("", key)
    key = key.lstrip("+")
    group, _, rest = key.partition(".")
    entry = rest.partition(".")[0]
    owner = entry if rest.partition(".")[2] else group
    index = "".join(re.findall(r"\d+\]", key.rpartition(".")[2])).replace("]", "_")  # each item has a variable of its own
    name = re.sub(r"\W+", "_", f"{owner}_{_last(key)}_{index}").strip("_").upper()
    read_by = _READ_BY.get(f"{group}.{entry}")
    text = entry == "wandb" and not is_secret_name(_last(key)) and "key" not in _last(key).lower()
    outside = " outside of hydra.sweeper" if in_sweeper else ""
    advice = f"Export {name} and set '{key}=${{oc.env:{name}}}'{outside}"
    if key.endswith("]"):  # which no override can name
        advice = f"Export {name} and write '${{oc.env:{name}}}' in its place{outside}"
    if read_by is not None:  # a tag, a note or a name is no place for it
        advice = f"Set what may be shown there, and export {read_by}" if text else f"Export {read_by}"
    elif group not in ("model", "data", "callbacks", "logger"):
        advice = "Export it in the shell of this command, which hands it on"
    elif named or rest.partition("[")[0] in _SHIPPED:
        advice = "Set what may be shown there"
    return ConfigError(message(key, Shown("set to a secret"), _RULE, "", advice))
