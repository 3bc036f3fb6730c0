"""What a W&B run holds beside its curves: where it was made, tables of plan, memory and ranks, last words of the summary."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from hybrid_strategy.planning.build_plan import rank_map
from hybrid_strategy.spec.ledger import MemoryLedger
from hybrid_strategy.spec.plan import Plan

_PACKAGES = ("hybrid-strategy", "torch", "lightning", "hydra-core", "wandb")
_VARIABLES = ("SLURM_JOB_ID", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID", "SLURM_JOB_NODELIST", "SLURM_RESTART_COUNT")
"""Only these are taken from the environment, whose other variables may hold secrets."""

_MAX_RANKS = 1024


@dataclass(frozen=True)
class Rows:
    """A table: `name` is its key in the run."""

    name: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]


def environment() -> dict[str, Any]:
    """Where and with what a run is made: `env/*`."""
    found: dict[str, Any] = {"python": platform.python_version(), "machine": platform.machine(), "system": platform.system()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found | {name.lower(): os.environ[name] for name in _VARIABLES if name in os.environ}


def plan_tables(plan: Plan, ledger: MemoryLedger | None) -> list[Rows]:
    """What will run where, and what the planner expects it to hold in memory, where it knows the model."""
    ranks = [{**row, "stages": str(row["stages"])} for row in rank_map(plan.layout, plan.rank_parameters)[:_MAX_RANKS]]
    tables = [_table("plan/ranks", ranks)]
    if plan.stage_units:
        stages = tuple((stage, len(units), ", ".join(units)) for stage, units in enumerate(plan.stage_units))
        tables.append(Rows("plan/stages", ("stage", "units", "names"), stages))
    if ledger is not None:
        lines = tuple((category, count) for category, count in ledger.by_category.items())
        tables.append(Rows("plan/memory", ("category", "bytes"), (*lines, ("total", ledger.total_bytes))))
    return tables


def rank_table(ranks: Sequence[Mapping[str, Any]]) -> Rows:
    """One row a rank: its host, its place in the mesh, its peak of memory."""
    return _table("ranks", ranks[:_MAX_RANKS])


def summary_of(result: Mapping[str, Any]) -> dict[str, Any]:
    """Plain numbers and words of `result.json` for the run's summary, `measured` and `forecast` with their parts."""
    flat: dict[str, Any] = {}
    for key, value in result.items():
        if key in ("measured", "forecast"):
            flat |= {f"{key}/{name}": each for name, each in (value or {}).items()}
        elif isinstance(value, (int, float, str)):
            flat[f"result/{key}"] = value
    return flat


def _table(name: str, rows: Sequence[Mapping[str, Any]]) -> Rows:
    columns = tuple(dict.fromkeys(key for row in rows for key in row))
    return Rows(name, columns, tuple(tuple(row.get(key) for key in columns) for row in rows))
