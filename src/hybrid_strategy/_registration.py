"""Registers the strategy name `hybrid` with Lightning: at once where Lightning is imported, else right after it is.

Lightning has no entry point for strategies (2.6: accelerator_connector.py looks a name up before callbacks' entry points load).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

NAME = "hybrid"
_MODULE = "lightning.pytorch.strategies"


def _make(**arguments: Any) -> Any:
    from importlib import import_module

    made = import_module("hybrid_strategy.strategy.hybrid").HybridParallelStrategy(**arguments)
    made.automatic = not arguments
    return made


def _register(module: ModuleType) -> None:
    registry = module.StrategyRegistry
    if NAME not in registry:
        registry.register(NAME, _make, description="Data, tensor, sequence and pipeline parallelism with a sharded optimizer")


class _RegisteringLoader(Loader):
    """Runs the module's own loader, then registers."""

    def __init__(self, inner: Loader) -> None:
        self._inner = inner

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._inner.exec_module(module)
        _register(module)


class _Finder(MetaPathFinder):
    """Finds Lightning's strategies once, and lets the loader register."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            spec.loader = _RegisteringLoader(spec.loader)
        return spec


def register_when_lightning_is_imported() -> None:
    """Makes `Trainer(strategy="hybrid")` work; imports nothing."""
    loaded = sys.modules.get(_MODULE)
    if loaded is not None and hasattr(loaded, "StrategyRegistry"):
        _register(loaded)
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
