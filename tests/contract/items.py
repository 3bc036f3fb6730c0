"""The contract's items: what each runs, and where it is refused."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from typing import Any

from hybrid_strategy.errors import ConfigError
from tests.contract.layouts import LAYOUTS, PLAIN, ContractLayout
from tests.contract.models import quiet
from tests.contract.same import RELATIVE, differences
from tests.support.ranks import run_ranks

MODULES = ("logging", "hook_logging", "evaluation", "optimizer", "hook", "batch", "precision", "model")
"""One file of items a point of the contract, `tests/contract/<name>_items.py`."""
TIMEOUT_SECONDS = float(os.environ.get("CONTRACT_TIMEOUT", "170"))
"""For one item in one layout; on a machine that does nothing else an item takes a few seconds."""


@dataclass(frozen=True)
class Item:
    """One promise.

    Attributes:
        point: its number in the contract.
        run: runs it in a layout, on every rank; the second argument is a folder that all ranks share. The keys of what it
            returns are compared on every rank, those under `rank_zero` on rank 0 only, those under `by_row`
            on the rank that has the row.
        refused: layout name -> words of the error that refuses it; explained in docs/limits.md.
        relative: tolerance of numbers.
    """

    name: str
    point: int
    run: Callable[[ContractLayout, str], Any]
    refused: Mapping[str, str] = field(default_factory=dict)
    relative: float = RELATIVE


@cache
def all_items() -> dict[str, Item]:
    found: dict[str, Item] = {}
    for name in MODULES:
        for item in import_module(f"tests.contract.{name}_items").ITEMS:
            found[item.name] = item
    return found


def _run_here(run: Callable[[ContractLayout, str], Any], layout: ContractLayout, folder: str) -> tuple[str, Any]:
    with quiet():
        try:
            return "ran", run(layout, folder)
        except ConfigError as error:
            return "refused", str(error)


_references: dict[str, Any] = {}


def reference(item: Item) -> Any:
    """What plain Lightning sees; kept by the item's name."""
    if item.name not in _references:
        with tempfile.TemporaryDirectory() as folder:
            found = run_ranks(_run_here, 1, item.run, PLAIN, folder, process_group=False, timeout=TIMEOUT_SECONDS)
        kind, record = found[0]
        if kind != "ran":
            raise AssertionError(f"plain Lightning refused {item.name}: {record}")
        _references[item.name] = record
    return _references[item.name]


def compare(name: str, layout_name: str) -> tuple[str, list[str]]:
    """`same`, `refused` or `different`, and why."""
    return compare_item(all_items()[name], LAYOUTS[layout_name])


def compare_item(item: Item, layout: ContractLayout) -> tuple[str, list[str]]:
    """The same for an item that is not in the contract's list."""
    with tempfile.TemporaryDirectory() as folder:
        answers = run_ranks(_run_here, layout.world_size, item.run, layout, folder, process_group=False, timeout=TIMEOUT_SECONDS)
    kinds = {kind for kind, _ in answers}
    if kinds == {"refused"}:
        words = item.refused.get(layout.name)
        wrong = [] if words else [f"refused without being listed: {answers[0][1]}"]
        wrong += [f"rank {rank}: {text}" for rank, (_, text) in enumerate(answers) if words and words not in text]
        return ("different", wrong) if wrong else ("refused", [answers[0][1]])
    if layout.name in item.refused or kinds != {"ran"}:
        return "different", [f"rank {rank} {kind}: {record}" for rank, (kind, record) in enumerate(answers)]
    wrong = []
    for rank, (_, record) in enumerate(answers):
        wanted = dict(reference(item))
        record = dict(record)
        wanted.pop("by_row", None), record.pop("by_row", None)
        if rank > 0:
            wanted.pop("rank_zero", None), record.pop("rank_zero", None)
        wrong += [f"rank {rank}: {each}" for each in differences(wanted, record, item.relative)]
    wrong += list(
        _rows_differ(reference(item).get("by_row", {}), [record.get("by_row", {}) for _, record in answers], item.relative)
    )
    return ("different", wrong) if wrong else ("same", [])


def _rows_differ(wanted: dict[str, Any], parts: list[dict[str, Any]], relative: float) -> Iterator[str]:
    """Each rank has some of the rows, all of them together have all."""
    for rank, part in enumerate(parts):
        yield from (
            f"rank {rank}: {each}" for each in differences({key: wanted.get(key) for key in part}, part, relative, "rows")
        )
    lost = wanted.keys() - {key for part in parts for key in part}
    if lost:
        yield f"no rank saw {sorted(lost)[:5]}"
