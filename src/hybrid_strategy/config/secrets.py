"""Keys, tokens and passwords stay out of files: what a run or a sweep writes is shown to others.

One rule for what is typed, what configuration files say and what launchers are told. A secret that is written down is refused;
one that is named, `${oc.env:NAME}`, stays a name in every file, and each rank reads the variable as it makes the object.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from hybrid_strategy.config.messages import Shown
from hybrid_strategy.config.settings import OPEN_GROUPS
from hybrid_strategy.config.targets import LANGUAGE_MODEL, TEXT_DATA
from hybrid_strategy.errors import ConfigError, message

_VARIABLE = re.compile(r"(?:\w*_)?(?:KEY|TOKEN|SECRET|PASSWORD|PASSWD)", re.IGNORECASE)
"""The name of a variable of the environment that holds a secret."""

_WHOSE = (
    "api|access|o?auth|bearer|hf|hub|hugging_?face|github|gitlab|wandb|session|refresh|security|service|personal|secret"
    "|bot|slack|discord|telegram|sas|jwt"
)
_NAME = re.compile(
    r"(?:.*_)?(?:password|passwd|pwd|passphrase|secrets?|authorization|apikey"
    rf"|(?:api|access|secret|private|auth|account|client|signing|encryption)_key|(?:{_WHOSE})_token)|token"
)
"""A key of a configuration that holds a secret; `pad_token` or `text_key` do not."""

_REFERENCE = re.compile(r"(?<!\\)\$\{oc\.env:\s*([A-Za-z_]\w*)\s*(?:,\s*null\s*)?\}")
_READ = re.compile(r"oc\.env:\s*[\"']?([A-Za-z_]\w*)")
"""Any way to read a variable: with a default, or within another resolver, too."""
_NODE = re.compile(r"\$\{([\w.]+)\}")
_WORD = re.compile(r"[a-z0-9](?=[A-Z])")
_ASSIGNED = re.compile(r"([\w-]+)=[\"']?[^\s\"'$`{*<\[]")
"""Of a line of a script, a URL, a list of arguments; what reads a secret from elsewhere, e.g. `TOKEN=$(cat file)`, is none, nor
is a pattern, e.g. of file names: `token={tokens}`."""

_IN_TEXT = re.compile(
    r"[a-z][\w+.-]*://[^\s/@:?#]*:[^\s/@?#]+@"  # user and password before a host
    r"|https?://[^\s/@:?#]+@"  # a token before a host
    r"|\b[Bb]earer\s+[\w.~+/=-]{8,}"
    r"|\b(?:hf_[A-Za-z0-9]{20,}|gh[opsur]_[A-Za-z0-9]{30,}|github_pat_\w{20,}|glpat-[\w-]{16,}|AKIA[0-9A-Z]{16})\b"
)
_READ_BY = {
    "logger.wandb": "WANDB_API_KEY, which W&B reads itself",
    "logger.mlflow": "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, which MLflow reads, beside a URI without them",
}
_OF_VARIABLES = ("environment", "env_set")
"""Settings of launchers and of Hydra whose keys are variables."""

_OF_A_SWEEP = re.compile(r"hydra\.sweeper\.(?:params|points\[\d+\])\.(?=.)")
_OF_HYDRA = ("job.env_set", "launcher", "sweeper")
"""What of Hydra's own settings is kept, in files of its own or of a launcher, whoever's that is."""
_RESOLVED = _OF_HYDRA[1:]
"""Hydra resolves these before they are kept: no name of a variable would be left."""

_LEAST_LENGTH = 6
"""A shorter text stands in others by chance."""

_RULE = "a secret would stand in the files of the run, which are shown to others"


def is_secret_name(name: str) -> bool:
    """Does a key of this name hold a secret?

    >>> [name for name in ("api_key", "apiKey", "HF_TOKEN", "token", "pad_token", "key", "max_tokens") if is_secret_name(name)]
    ['api_key', 'apiKey', 'HF_TOKEN', 'token']
    """
    return _NAME.fullmatch(_WORD.sub(r"\g<0>_", name).replace("-", "_").lower()) is not None


def holds_secret(name: str, value: object) -> bool:
    """Is a secret written down under this name? One that a variable holds is not.

    >>> [holds_secret(*each) for each in [("password", "x"), ("password", "${oc.env:PW}"), ("url", "http://u:pw@host")]]
    [True, False, True]
    """
    if isinstance(value, bool) or value is None:
        return False
    named = is_secret_name(name)
    if not isinstance(value, str):
        return named and isinstance(value, (int, float)) and not name.lower().endswith("token")  # a number of a word
    if named and value and not _REFERENCE.search(value) and not (value[0] in "<[" and value[-1] in ">]"):
        return True
    rest = _REFERENCE.sub("", value)
    return bool(_IN_TEXT.search(rest)) or any(is_secret_name(found.strip("-")) for found in _ASSIGNED.findall(rest))


def check_typed(overrides: Sequence[Override]) -> None:
    """The overrides of a command line or a sweep's file, which are kept as they are typed.

    Raises:
        ConfigError: one of them holds a secret.
    """
    for override in overrides:
        for value in _typed_values(override):
            for key, each in _leaves(value, override.key_or_group):
                if "${" not in str(each) or _REFERENCE.search(str(each)):  # of other interpolations more is known when composed
                    _refuse(key, each)


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
    for key, value in _leaves(values, prefix):
        _refuse(key, value)


def check_hydra(config: DictConfig) -> None:
    """Settings of Hydra's, wherever they were said.

    Raises:
        ConfigError: one of them holds a secret, or would.
    """
    for path in _OF_HYDRA:
        values = OmegaConf.select(config, f"hydra.{path}")
        for key, each in _leaves(_plain(values), f"hydra.{path}") if isinstance(values, DictConfig) else ():
            _refuse(key, each)
            if path in _RESOLVED and any(map(_is_of_secret, _READ.findall(str(each)))):
                raise _refusal(key)


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
    return {key: naming.named(raw.get(key), value, key) for key, value in values.items()}


def _held(raw: Mapping[str, Any]) -> dict[str, str]:
    """Secrets -> the variables that hold them, of all that the configuration reads, the longest first."""
    found = {}
    for key, text in _leaves(raw, ""):
        for variable in _READ.findall(str(text)):
            value = os.environ.get(variable, "")
            if len(value) >= _LEAST_LENGTH and (_is_of_secret(variable) or holds_secret(_last(key), value)):
                found[value] = variable
    return dict(sorted(found.items(), key=lambda each: -len(each[0])))


@dataclass(frozen=True)
class _Naming:
    """Puts names of variables in place of secrets. `root`: the configuration with its interpolations."""

    root: Mapping[str, Any]
    held: Mapping[str, str]

    def named(self, raw: Any, value: Any, key: str) -> Any:
        """The value for files. `raw`: as it was written; None where a resolver has made it."""
        while isinstance(raw, str) and (found := _NODE.fullmatch(raw)):
            raw = _at(self.root, found[1])
        if isinstance(value, Mapping):
            below = raw if isinstance(raw, Mapping) else {}
            return {name: self.named(below.get(name), each, f"{key}.{name}") for name, each in value.items()}
        if isinstance(value, list):
            items = raw if isinstance(raw, list) and len(raw) == len(value) else [None] * len(value)
            return [self.named(items[index], each, f"{key}[{index}]") for index, each in enumerate(value)]
        if isinstance(raw, str) and _REFERENCE.search(raw):
            return self._referred(raw, value, key)
        named = self._replaced(value) if isinstance(value, str) and (raw is None or "${" in str(raw)) else value
        _refuse(key, named)
        if named != value and not _is_made_by_ranks(self.root, key):
            raise _refusal(key)
        return named

    def _referred(self, raw: str, value: Any, key: str) -> Any:
        name, variables = _last(key), _REFERENCE.findall(raw)
        if not (holds_secret(name, value) or is_secret_name(name) or any(_VARIABLE.fullmatch(each) for each in variables)):
            return value
        _refuse(key, raw)  # a part of it may be written down
        if "${" in _REFERENCE.sub("", raw) or not _is_made_by_ranks(self.root, key):
            raise _refusal(key)
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
    group = key.partition(".")[0]
    own = _at(root, f"{group}._target_") not in (LANGUAGE_MODEL, TEXT_DATA)
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


def _leaves(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for name, each in value.items():
            yield from _leaves(each, f"{key}.{name}")
    elif isinstance(value, (list, tuple)):
        for index, each in enumerate(value):
            yield from _leaves(each, f"{key}[{index}]")
    else:
        yield key, value


def _last(key: str) -> str:
    return re.sub(r"(?:\[\d+\])+$", "", key).rpartition(".")[2]


def _refuse(key: str, value: Any) -> None:
    parts = key.split(".")
    variable = len(parts) > 1 and parts[-2] in _OF_VARIABLES and parts[0] == "hydra" and _VARIABLE.fullmatch(parts[-1])
    script = key.startswith("hydra.launcher.") and any(_VARIABLE.fullmatch(each) for each in _ASSIGNED.findall(str(value)))
    if holds_secret(_last(key), value) or script or (variable and value and not _REFERENCE.search(str(value))):
        raise _refusal(key)


def _refusal(key: str) -> ConfigError:
    key, in_sweeper = _OF_A_SWEEP.subn("", key)
    key = key.lstrip("+")
    group, _, rest = key.partition(".")
    entry = rest.partition(".")[0]
    name = re.sub(r"\W+", "_", f"{entry}_{_last(key)}" if rest.partition(".")[2] else f"{group}_{_last(key)}").upper()
    read_by = _READ_BY.get(f"{group}.{entry}")
    advice = f"Export {name} and set '{key}=${{oc.env:{name}}}'{' outside of hydra.sweeper' if in_sweeper else ''}"
    if read_by is not None:
        advice = f"Export {read_by}"
    elif group not in ("model", "data", "callbacks", "logger"):
        advice = "Export it in the shell of this command, which hands it on"
    return ConfigError(message(key, Shown("set to a secret"), _RULE, "", advice))
