"""The command line's overrides before Hydra composes them: unknown keys are refused, with or without a `+`.

Hydra adds whatever comes with a `+`, and advises one for every unknown key; both turn a typo into a setting that is ignored.
"""

from __future__ import annotations

from collections.abc import Sequence

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import OverrideParseException
from omegaconf import DictConfig, OmegaConf

from hybrid_strategy.config.door import known_keys
from hybrid_strategy.config.messages import Shown, no_such_key, unreadable
from hybrid_strategy.config.secrets import check_typed
from hybrid_strategy.config.settings import GROUPS, OPEN_GROUPS, RunConfig
from hybrid_strategy.config.targets import BY_TARGET, LANGUAGE_MODEL
from hybrid_strategy.errors import ConfigError, message

OWN = "own"
"""The option of `model` and `data` that holds nothing but a `_target_`."""

_OPTIONAL = ("callbacks", "logger", "experiment", "debug", "sweeps")
"""Groups that a run may be without."""

_ELSEWHERE = {
    "trainer.devices": "cluster.devices",
    "trainer.num_nodes": "cluster.num_nodes",
    "trainer.precision": "precision.mode",
    "trainer.strategy": "strategy",
    "ckpt_path": "resume",
    "task_name": "name",
}
"""Where users of Lightning and of lightning-hydra-template look first -> where it is."""


def checked(overrides: Sequence[str]) -> list[str]:
    """The overrides as Hydra should get them.

    Plain overrides below an open group may name keys that no file mentions, so they are handed on with `++`; what they may
    name is decided after composition, when `_target_` is known.

    Raises:
        ConfigError: a key does not exist, or an override cannot be read; the message has the form that can.
    """
    parsed = [_parse(text) for text in overrides]
    check_typed(parsed)
    accepted = [_check(override, text) for override, text in zip(parsed, overrides, strict=True)]
    return [*_own_groups(parsed), *accepted]


def check_nothing_ignored(overrides: Sequence[str], model: DictConfig) -> None:
    """A model of the user's own makes its own optimizer: settings of ours that it does not take over would do nothing.

    Raises:
        ConfigError: such a setting is on the command line.
    """
    if OmegaConf.is_missing(model, "_target_") or model.get("_target_") == LANGUAGE_MODEL:
        return
    taken = str(OmegaConf.to_container(model, resolve=False))
    for text in overrides:
        key, _, value = text.lstrip("+").partition("=")
        group = key.partition(".")[0]
        if group in ("optimizer", "learning_rate") and f"${{{group}" not in taken:
            rule = "the model is your own and does not take it over, so it would be ignored"
            whole = key if "." in key else group
            raise ConfigError(message(key, Shown(value), rule, "", f"Hand it on: '+model.{group}=${{{whole}}}', or leave it out"))


def _own_groups(overrides: Sequence[Override]) -> list[str]:
    """`model=own` where `model._target_` names a class of the user's: the keys of the default option are not meant for it."""
    chosen = {each.key_or_group for each in overrides if not isinstance(each.value(), dict)}
    own = {each.key_or_group.partition(".")[0] for each in overrides if _names_own_target(each)}
    return [f"{group}={OWN}" for group in ("model", "data") if group in own and group not in chosen]


def _names_own_target(override: Override) -> bool:
    group, _, rest = override.key_or_group.partition(".")
    value = override.value()
    target = value if rest == "_target_" else value.get("_target_") if not rest and isinstance(value, dict) else None
    return group in ("model", "data") and target is not None and str(target) not in BY_TARGET


def _parse(text: str) -> Override:
    try:
        override: Override = OverridesParser.create().parse_overrides([text])[0]
    except OverrideParseException as error:
        key, equal, _ = text.partition("=")
        if not equal:
            rule = "an override is key=value"
            raise ConfigError(message(key, Shown("given without a value"), rule, "", f"Set {key}=<value>")) from error
        raise unreadable(text) from error
    if not override.key_or_group:
        raise ConfigError(message("An override", Shown(text), "it is key=value", "", "Set <key>" + text))
    return override


def _value_text(override: Override) -> str:
    """As it was typed; Hydra itself cannot write the values of a sweep as text."""
    return str(override.input_line).partition("=")[2]


def _check(override: Override, text: str) -> str:
    key = override.key_or_group
    root = key.partition(".")[0]
    if key in OPEN_GROUPS and isinstance(override.value(), dict):
        return f"++{text.lstrip('+')}"
    value = override.value()
    if key in ("hydra.launcher", "hydra.sweeper") and not isinstance(value, dict):
        group = key.replace(".", "/")
        rule = "what is chosen is an option of a group, written with a slash"
        raise ConfigError(message(key, Shown(_value_text(override)), rule, "", f"Set {group}={_value_text(override)}"))
    no_name = isinstance(value, (bool, int, float)) or (value is None and not override.is_delete())
    if (key in (*GROUPS, "hydra") or "/" in key) and no_name:
        rule, advice = "the option of a group is a name", f"hybrid plan --info searchpath shows where {key}/ is looked for"
        if value is None:
            advice = "Set a name, or leave it out"
        raise ConfigError(message(key, Shown(_value_text(override)), rule, "", advice))
    if key in GROUPS and key not in _OPTIONAL and override.is_delete():
        raise ConfigError(message(key, Shown("deleted"), "every run has one", "", f"Set {key}=<option>, or leave it out"))
    if key in GROUPS and (override.is_add() or override.is_force_add()):
        rule = "every group is there already, and has one option"
        raise ConfigError(message(key, Shown("added"), rule, "", f"Set {key}={_value_text(override)}"))
    if key in GROUPS and key not in _OPTIONAL and isinstance(value, list):
        rule = "the options of this group set the same keys, so the last would win over the others"
        raise ConfigError(message(key, Shown(_value_text(override)), rule, "", f"Set one, and single keys: {key}.<key>=<value>"))
    if root.partition("/")[0] == "hydra" or "/" in key or override.package is not None or key in GROUPS:
        return text
    unknown = known_keys(RunConfig, key)
    if unknown is not None and root not in OPEN_GROUPS:
        where, names = unknown
        shown = Shown("deleted" if override.is_delete() else _value_text(override))
        if where in _ELSEWHERE:
            raise ConfigError(message(where, shown, "there is no such key", "", f"Set {_ELSEWHERE[where]}"))
        raise no_such_key(where, shown, names if "." in where else [*names, "experiment", "debug"])
    if override.is_delete() and root not in ("callbacks", "logger", "model", "data"):
        rule = "another default than that of its option would stand there"
        raise ConfigError(message(key, Shown("deleted"), rule, "", f"Set {key}=<value>, or leave it out"))
    open_here = (root in OPEN_GROUPS and "." in key) or key.startswith("strategy.parallel_plan.")
    if open_here and not text.startswith(("+", "~")):
        return f"++{text}"
    return text
