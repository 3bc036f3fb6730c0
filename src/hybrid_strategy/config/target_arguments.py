"""Does what a `_target_` names take the arguments that stand beside it? Read from source, like the name itself."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

from hybrid_strategy.errors import ConfigError, did_you_mean, message

HYDRA_WORDS = ("_target_", "_args_", "_partial_", "_recursive_", "_convert_")
"""Keys beside `_target_` that are no arguments."""


def check_arguments(key: str, target: str, values: Mapping[str, Any], signature: ast.arguments | None) -> None:
    """Refuses an argument that is not taken, and the lack of one that must be given.

    Args:
        key: of the mapping that holds `_target_`.
        target: what `_target_` says.
        values: the mapping.
        signature: of the function, without `self`; None where the source alone does not tell, which passes.

    Raises:
        ConfigError: the call would be a TypeError.
    """
    if signature is None:
        return
    given = [name for name in values if name not in HYDRA_WORDS]
    named = [each.arg for each in (*signature.args, *signature.kwonlyargs)]
    for name in given:
        if name not in named and signature.kwarg is None:
            rule = f"{target} takes no such argument"
            raise ConfigError(message(f"{key}.{name}", values[name], rule, "", did_you_mean(name, named) if named else ""))
    if values.get("_args_") or values.get("_partial_"):
        return
    missing = [name for name in _must_be_given(signature) if name not in given]
    if missing:
        rule = f"{target} cannot be called without {', '.join(missing)}"
        raise ConfigError(message(key, _shown(given), rule, "", f"Set {', '.join(f'{key}.{name}' for name in missing)}"))


def signature_of(tree: ast.Module, name: str) -> ast.arguments | None:
    """What `name` of a module takes by keyword, where its source alone tells: it is bound once, and nothing decorates it."""
    found = [each for each in ast.walk(tree) if name in (getattr(each, "name", None), getattr(each, "id", None)) and _binds(each)]
    if len(found) != 1 or found[0] not in tree.body:
        return None
    node = found[0]
    if isinstance(node, ast.FunctionDef):
        return None if node.decorator_list else _by_keyword(node.args, 0)
    if not isinstance(node, ast.ClassDef) or node.decorator_list or node.keywords:
        return None
    written = [each for each in node.body if isinstance(each, ast.FunctionDef) and each.name in ("__init__", "__new__")]
    if len(written) != 1 or written[0].name != "__init__" or written[0].decorator_list:
        return None
    return _by_keyword(written[0].args, 1)


def _binds(node: ast.AST) -> bool:
    return isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) or isinstance(
        getattr(node, "ctx", None), ast.Store
    )


def _by_keyword(arguments: ast.arguments, bound: int) -> ast.arguments | None:
    """The arguments behind the `bound` first ones; None where one can only be given by position."""
    if len(arguments.posonlyargs) > bound:
        return None
    first = bound - len(arguments.posonlyargs)
    return ast.arguments(
        posonlyargs=[],
        args=arguments.args[first:],
        kwonlyargs=arguments.kwonlyargs,
        kw_defaults=arguments.kw_defaults,
        kwarg=arguments.kwarg,
        defaults=arguments.defaults,
    )


def _must_be_given(signature: ast.arguments) -> list[str]:
    plain = len(signature.args) - len(signature.defaults)
    only = zip(signature.kwonlyargs, signature.kw_defaults, strict=True)
    return [each.arg for each in signature.args[: max(0, plain)]] + [each.arg for each, default in only if default is None]


def _shown(given: list[str]) -> str:
    return f"given with {', '.join(given)}" if given else "given without arguments"
