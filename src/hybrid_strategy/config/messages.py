"""What Hydra and OmegaConf say of a wrong configuration, said by full key and with what to set."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hydra.errors import HydraException, MissingConfigException
from omegaconf import OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException
from yaml import MarkedYAMLError

from hybrid_strategy.config.door import describe, known_keys
from hybrid_strategy.config.folders import shipped_folder
from hybrid_strategy.config.settings import AUTO, GROUPS, RunConfig
from hybrid_strategy.errors import ConfigError, did_you_mean, message

HYDRA_ERRORS: tuple[type[Exception], ...] = (HydraException, OmegaConfBaseException, MarkedYAMLError)

_FULL_KEY = re.compile(r"full_key: (\S+)")
_VALUE = re.compile(r"^Value (.*) of type '(\w+)'", re.DOTALL)
_FILE = re.compile(r"^In '([^']*)'")
_NOT_IN = re.compile(r"^Key '.*' not in '(\w+)'", re.MULTILINE)
_ABSENT = re.compile(r"^Could not delete from config\. '(.*)' does not exist\.")
_LISTED = re.compile(r"Could not load '(.+)/([^/']+)'")
_AMBIGUOUS = re.compile(r"^Ambiguous value for argument '(.*)'$", re.MULTILINE)


@dataclass(frozen=True)
class Shown:
    """A value as the user typed it, or words about it: not quoted in a message."""

    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Place:
    """Where an error arose. `kind`, `prefix`: as in `explained`; `source`: the file; `given`: the value, None: not known."""

    key: str
    kind: type
    prefix: str
    source: str
    given: object


def quoted(override: str) -> str:
    """The override as it must be typed in a shell so that the value arrives unchanged.

    >>> print(quoted("resume=runs/epoch=3.ckpt"))
    'resume="runs/epoch=3.ckpt"'
    """
    key, _, value = override.partition("=")
    inner = value.replace('"', '\\"').replace("'", "'\\''")
    return f"'{key}=\"{inner}\"'"


def unreadable(override: str) -> ConfigError:
    """The refusal of a value that Hydra's grammar does not take; each value of a list or a sweep is quoted by itself.

    >>> print(unreadable("model=llama_tiny,mödel"))
    model is llama_tiny,mödel: Hydra cannot read this value. Quote it: 'model=llama_tiny,"mödel"'.
    >>> print(unreadable("tags=[a<b,c d]"))
    tags is [a<b,c d]: Hydra cannot read this value. Quote it: 'tags=["a<b","c d"]'.
    """
    key, _, value = override.partition("=")
    advice, parts = quoted(override), value.split(",")
    if re.fullmatch(r"\[[^\[\]{}\"']+\]", value):
        advice = f"'{key}=[" + ",".join(f'"{each.strip()}"' for each in value[1:-1].split(",")) + "]'"
    elif len(parts) > 1 and not re.search(r"[\[\](){}\"']", value):
        plain = re.compile(r"[\w./:+-]+", re.ASCII)
        each = ",".join(part if plain.fullmatch(part) else f'"{part}"' for part in parts)
        is_group = key.lstrip("+") in GROUPS or "/" in key
        advice = f"'{key}={each}'" if is_group else f"{advice}, or for a sweep '{key}={each}'"
    return ConfigError(message(key, Shown(value), "Hydra cannot read this value", "", f"Quote it: {advice}"))


def no_such_key(full_key: str, shown: Shown, names: Sequence[str]) -> ConfigError:
    """The refusal of an unknown key; `names` are those known where it stands."""
    known = [name for name in names if not name.startswith("_")]
    advice = did_you_mean(full_key.rpartition(".")[2], known)
    return ConfigError(message(full_key, shown, "there is no such key", "", advice))


def explained(
    error: Exception, kind: type = RunConfig, prefix: str = "", given: Mapping[str, object] | None = None
) -> ConfigError:
    """The error for the user.

    Args:
        error: raised by Hydra or OmegaConf, or by the YAML reader that they use.
        kind: the dataclass whose keys are meant.
        prefix: the dotted path at which `kind` stands in the whole configuration.
        given: values as the user gave them, by the same keys as the error's: OmegaConf does not always tell them.
    """
    if isinstance(error, MissingConfigException):
        return _no_such_option(error)
    if isinstance(error, MarkedYAMLError):
        return _no_yaml(error)
    ambiguous = _AMBIGUOUS.search(str(error))
    if ambiguous is not None:
        name, _, value = ambiguous[1].partition("=")
        sweep = "-m to run one after the other"
        values = f"Quote it: {quoted(ambiguous[1])}; or {name}=[{value}] for a list, or {sweep}"
        advice = f"Set one of them, or {sweep}" if name in GROUPS or "/" in name else values
        return ConfigError(message(name, Shown(value), "a comma separates the values of a sweep", "", advice))
    absent = _ABSENT.search(str(error))
    if absent is not None:
        return ConfigError(message(absent[1], Shown("deleted"), "there is no such key", "", "Leave it out"))
    text, key = _deepest(error)
    if key is None:
        return ConfigError(text.strip())
    where = _FILE.match(str(error))
    source = f" (in {'' if where[1].startswith('sweeps/') else 'conf/'}{where[1]}.yaml)" if where else ""
    return _by_key(text, Place(key, kind, prefix, source, (given or {}).get(key)))


def _no_yaml(error: MarkedYAMLError) -> ConfigError:
    mark = error.problem_mark
    where = f"{mark.name}, line {mark.line + 1}" if mark is not None else "a file"
    return ConfigError(message(where, Shown("no YAML"), error.problem or "it cannot be read", "", ""))


def _deepest(error: Exception) -> tuple[str, str | None]:
    """Text and full key of the innermost OmegaConf error."""
    text, key = str(error), None
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OmegaConfBaseException):
            text, key = str(cause), cause.full_key or None
            if isinstance(cause, MissingMandatoryValue):
                text = "missing"
        cause = cause.__cause__
    found = _FULL_KEY.search(text)
    return text, key or (found[1] if found else None)


def _by_key(text: str, place: Place) -> ConfigError:
    key, kind, prefix, source = place.key, place.kind, place.prefix, place.source
    full_key = f"{prefix}.{key}" if prefix else key
    lines = [line for line in text.splitlines() if not line.startswith((" ", "\t"))]
    if "nterpolation" in text:
        return ConfigError(message(full_key, Shown(f"not resolved{source}"), " ".join(lines), "", ""))
    unknown = known_keys(kind, key) if not full_key.startswith("hydra.") or prefix else None
    if unknown is not None and (having := _options_with(full_key)):
        return _not_of_chosen(
            full_key, f"{prefix.replace('.', '/')}={kind.__name__.removesuffix('Settings').lower()}", having, source
        )
    if unknown is not None:
        where, names = unknown
        return no_such_key(f"{prefix}.{where}" if prefix else where, Shown(f"set{source}"), names)
    absent = _NOT_IN.search(text)
    if absent is not None:
        return _not_of_chosen(full_key, absent[1].removesuffix("Conf"), _options_with(full_key), source)
    if text == "missing":
        return ConfigError(message(full_key, Shown("missing"), "it has no default", "", f"Set {full_key}=<value>"))
    wanted = describe(kind, key)
    if full_key.startswith(("strategy.", "cluster.")):  # the only word that may stand for a number there
        wanted = wanted.replace(" or text", f" or {AUTO}")
    value = _VALUE.match(lines[-1] if lines else "")
    if wanted:
        null = "is not Optional" in text or "Incompatible value 'None'" in text
        typed = "of another type" if place.given is None else str(place.given)
        shown = value[1].strip("'") if value is not None else "null" if null else typed
        advice = (
            f"Set {wanted}"
            if "a list" not in wanted or place.given is None or shown is not typed
            else f"Set {wanted}, such as [{typed}]"
        )
        return ConfigError(message(full_key, Shown(shown + source), f"it must be {wanted}", "", advice))
    return ConfigError(message(full_key, Shown(f"wrong{source}"), " ".join(lines) or text, "", ""))


def _not_of_chosen(key: str, chosen: str, having: Sequence[str], source: str) -> ConfigError:
    """A key below `hydra` that what is chosen there does not have, e.g. of another launcher or sweeper."""
    group = key.rpartition(".")[0].replace(".", "/")
    other = "leave it out" if not source else f"leave {group} out"  # what a file says, another choice of the user's contradicts
    advice = f"Set {group}={' or '.join(having)}, or {other}" if having else other.capitalize()
    return ConfigError(message(key, Shown(f"set{source}"), f"{chosen} has no such key", "", advice))


def _options_with(key: str) -> list[str]:
    """The shipped launchers, or sweepers, that have a key such as `hydra.sweeper.axes`."""
    group, _, name = key.rpartition(".")
    files = sorted((shipped_folder("conf") / group.replace(".", "/")).glob("*.yaml")) if group.startswith("hydra.") else []
    return [path.stem for path in files if name in OmegaConf.load(path)]


_PLUGINS = {
    "submitit_": "'hybrid-strategy[submitit]'",
    "joblib": "hydra-joblib-launcher",
    "optuna": "hydra-optuna-sweeper",
    "ax": "hydra-ax-sweeper",
    "nevergrad": "hydra-nevergrad-sweeper",
}
"""Beginning of an option of hydra/launcher or hydra/sweeper -> what brings it."""


def _no_such_option(error: MissingConfigException) -> ConfigError:
    group, _, option = (error.missing_cfg_file or "").removesuffix(".yaml").rpartition("/")
    if not group and option:
        rule = "there is no configuration of this name"
        return ConfigError(message("--config-name", option, rule, "", "Set train, or the name of a file in --config-dir"))
    listed = _LISTED.search(str(error)) if not error.options else None
    if listed is not None:  # one of several options of a group, of which Hydra does not tell the others
        group, option = listed[1], listed[2]
    options = error.options or [path.stem for path in sorted((shipped_folder("conf") / group).glob("*.yaml"))]
    if not options or not group:
        return ConfigError(str(error).split("\nConfig search path")[0].strip())
    known = [each for each in options if not each.startswith("_")]
    rule = f"there is no option of this name in the group {group}"
    plugin = next((name for start, name in _PLUGINS.items() if group.startswith("hydra/") and option.startswith(start)), None)
    advice = did_you_mean(option, known) if plugin is None else f"It comes with a plug-in of Hydra: pip install {plugin}"
    return ConfigError(message(group, option, rule, "", advice))
