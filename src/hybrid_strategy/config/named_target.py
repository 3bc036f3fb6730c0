"""Is there what a `_target_` names? Read from source, since importing a module of the user's may take seconds and do anything."""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hybrid_strategy.config.settings import RunConfig
from hybrid_strategy.config.target_arguments import check_arguments, signature_of
from hybrid_strategy.config.targets import BY_TARGET
from hybrid_strategy.errors import ConfigError, did_you_mean, message

_RULE = "it must be module.Class of a module that Python finds here"
_ADVICE = "Set the full name, and start where the module lies or install it"
_MAKES_NAMES = ("globals", "setattr", "exec", "vars")
"""Functions by which a module may get names that are not written in it."""
_MOST_SHOWN = 20


@dataclass(frozen=True)
class Module:
    """A module that was found. `rest`: the parts of the name that are behind it."""

    spec: ModuleSpec
    rest: tuple[str, ...]


def check_targets(config: RunConfig) -> None:
    """Every `_target_` of the open groups that is not shipped.

    Raises:
        ConfigError: its module is not there, cannot be read, or has no such name.
    """
    for group in ("model", "data", "callbacks", "logger"):
        for key, values in _targets(getattr(config, group), group):
            if str(values["_target_"]) not in BY_TARGET:
                check_target(key, values)


def check_target(within: str, values: Mapping[str, Any]) -> None:
    """Refuses a name behind which there is nothing; what cannot be told from source passes, and the ranks find out."""
    key, target = f"{within}._target_", str(values["_target_"])
    found = _module(target.split("."))
    if found is None:
        raise ConfigError(message(key, target, _RULE, "", _ADVICE))
    if not found.rest:
        raise ConfigError(message(key, target, "it is a module, and a class is wanted", "", f"Set {target}.<class>"))
    source = Path(found.spec.origin or "")
    if source.suffix != ".py" or not source.is_file():
        return
    try:
        tree = ast.parse(source.read_bytes())
    except (SyntaxError, ValueError) as error:
        raise ConfigError(message(key, target, "its module cannot be read", f"{source}: {error}", "Mend the module")) from error
    names = _names(tree)
    if names is not None and found.rest[0] not in names:
        shown = [name for name, is_class in names.items() if is_class] or list(names)
        advice = did_you_mean(found.rest[0], shown[:_MOST_SHOWN]) if shown else ""
        raise ConfigError(message(key, target, f"there is no {found.rest[0]} in {source}", "", advice))
    if names is not None and len(found.rest) == 1:
        check_arguments(within, target, values, signature_of(tree, found.rest[0]))


def _targets(values: Any, key: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Full key and content of every mapping with a `_target_` in plain containers, in their order."""
    if isinstance(values, Mapping):
        if values.get("_target_") is not None:
            yield key, values
        for name, each in values.items():
            yield from _targets(each, f"{key}.{name}")
    elif isinstance(values, (list, tuple)):
        for index, each in enumerate(values):
            yield from _targets(each, f"{key}[{index}]")


def _module(parts: list[str]) -> Module | None:
    """The longest beginning of the name that is a module."""
    if len(parts) < 2 or not all(part.isidentifier() for part in parts):
        return None
    spec = _first(parts[0])
    if spec is None:
        return None
    for depth in range(1, len(parts)):
        if not spec.submodule_search_locations:
            return Module(spec, tuple(parts[depth:]))
        # by its last name: of a folder without __init__.py Python would look for the parent among imported modules
        below = PathFinder.find_spec(parts[depth], list(spec.submodule_search_locations))
        if below is None:
            return Module(spec, tuple(parts[depth:]))
        spec = below
    return Module(spec, ())


def _first(name: str) -> ModuleSpec | None:
    """The folder where the command was called comes first, as for the ranks."""
    spec = PathFinder.find_spec(name, [os.getcwd(), *sys.path])
    if spec is not None:
        return spec
    try:
        return find_spec(name)  # built in, or found by an importer of its own
    except (ImportError, ValueError):
        return None


def _names(tree: ast.Module) -> dict[str, bool] | None:
    """Names that the module binds when it is run, and whether by a class; None where the source alone does not tell."""
    found: dict[str, bool] = {}
    for node in _run_nodes(tree):
        if isinstance(node, ast.ClassDef):
            found[node.name] = True
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            found[node.name] = False
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found[node.id] = False
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            found.update({alias.asname or alias.name.partition(".")[0]: False for alias in node.names})
    called = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    found.update({name: False for node in ast.walk(tree) if isinstance(node, ast.Global) for name in node.names})
    told = "*" not in found and "__getattr__" not in found and not called & set(_MAKES_NAMES)
    return found if told and "modules" not in _attributes(tree) else None


def _attributes(tree: ast.Module) -> set[str]:
    """Attributes of `sys` that the module uses: one that takes its own place in `sys.modules` may have any name."""
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "sys"
    }


def _run_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Everything that runs with the module itself: not what is inside of functions and classes."""
    for node in ast.iter_child_nodes(tree):
        yield node
        if not isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            yield from _run_nodes(node)
