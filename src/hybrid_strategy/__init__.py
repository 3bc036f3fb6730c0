"""A PyTorch Lightning strategy for data, tensor, sequence and pipeline parallelism with a sharded optimizer.

Importing this package is cheap: torch and Lightning are imported when a name is used. It makes `Trainer(strategy="hybrid")` work.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hybrid_strategy import _registration

if TYPE_CHECKING:
    from hybrid_strategy.parity.check import check_parity
    from hybrid_strategy.parity.report import ParityReport
    from hybrid_strategy.parity.request import ParityOptions
    from hybrid_strategy.spec.layout import Layout
    from hybrid_strategy.spec.parallel_plan import ParallelPlan
    from hybrid_strategy.strategy.from_checkpoint import load_from_checkpoint
    from hybrid_strategy.strategy.hybrid import HybridParallelStrategy

__version__ = "0.1.0"

__all__ = [
    "HybridParallelStrategy",
    "Layout",
    "ParallelPlan",
    "ParityOptions",
    "ParityReport",
    "__version__",
    "check_parity",
    "load_from_checkpoint",
]

_HOMES = {
    "HybridParallelStrategy": "hybrid_strategy.strategy.hybrid",
    "Layout": "hybrid_strategy.spec.layout",
    "ParallelPlan": "hybrid_strategy.spec.parallel_plan",
    "ParityOptions": "hybrid_strategy.parity.request",
    "ParityReport": "hybrid_strategy.parity.report",
    "check_parity": "hybrid_strategy.parity.check",
    "load_from_checkpoint": "hybrid_strategy.strategy.from_checkpoint",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


_registration.register_when_lightning_is_imported()
