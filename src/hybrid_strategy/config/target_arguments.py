"""Does what a `_target_` names take the arguments that stand beside it? Read from source, like the name itself."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

from hybrid_strategy.errors import ConfigError, did_you_mean, message

HYDRA_WORDS = ("_target_", "_args_", "_partial_", "_recursive_", "_convert_")
"""Keys beside `_target_` that are no arguments."""
PLAIN_BASES = ("lightning", "pytorch_lightning", "torch", "typing", "abc", "hybrid_strategy")
"""Packages whose classes neither have a metaclass that takes arguments nor change the classes below them."""


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
    """What `name` of a module takes by keyword, where its source alone tells.

    It is bound once, nothing decorates it, nobody gives it another `__init__` later, and no class above it that is not known
    may have a metaclass or an `__init_subclass__`, which change what is called.
    """
    found = _bindings(tree, name)
    if len(found) != 1 or found[0] not in tree.body:
        return None
    node = found[0]
    if isinstance(node, ast.FunctionDef):
        return None if node.decorator_list else _by_keyword(node.args, 0)
    if not isinstance(node, ast.ClassDef) or not _calls_its_init(tree, node):
        return None
    written = _methods(node, "__init__")
    if len(written) != 1 or written[0].decorator_list:
        return None
    return _by_keyword(written[0].args, 1)


def _bindings(tree: ast.Module, name: str) -> list[ast.AST]:
    """The nodes, at any depth, that bind a name."""
    found: list[ast.AST] = []
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            bound = name in [alias.asname or alias.name.partition(".")[0] for alias in node.names]
        elif isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            bound = node.name == name
        else:
            bound = isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id == name
        found += [node] if bound else []
    return found


def _calls_its_init(tree: ast.Module, node: ast.ClassDef) -> bool:
    """Does a call of the class, or of one below it with an `__init__` of its own, take what that `__init__` takes?"""
    if node.decorator_list or node.keywords or _methods(node, "__new__", "__init_subclass__"):
        return False
    stores = [each for each in ast.walk(tree) if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store)]
    if any(each.attr in ("__init__", "__new__", "__signature__") for each in stores):
        return False
    return all(_is_plain(tree, base, node.lineno) for base in node.bases)


def _is_plain(tree: ast.Module, base: ast.expr, line: int) -> bool:
    """Is a base class known to leave the call alone? `line`: of the class below it."""
    named = base.value if isinstance(base, ast.Subscript) else base
    root = named
    while isinstance(root, ast.Attribute):
        root = root.value
    if not isinstance(root, ast.Name):
        return False
    found = _bindings(tree, root.id)
    if len(found) == 1 and isinstance(found[0], ast.ClassDef):
        return root is named and found[0].lineno < line and _calls_its_init(tree, found[0])
    return root.id == "object" if not found else all(_origin(each, root.id) in PLAIN_BASES for each in found)


def _origin(node: ast.AST, name: str) -> str:
    """The package that an import takes a name from; empty where the node is no import of another package."""
    if isinstance(node, ast.ImportFrom):
        return "" if node.level else str(node.module).partition(".")[0]
    if isinstance(node, ast.Import):
        return next(
            (each.name.partition(".")[0] for each in node.names if name in (each.asname, each.name.partition(".")[0])), ""
        )
    return ""


def _methods(node: ast.ClassDef, *names: str) -> list[ast.FunctionDef]:
    return [each for each in node.body if isinstance(each, ast.FunctionDef) and each.name in names]


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
