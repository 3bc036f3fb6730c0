"""What goes into a checkpoint and what comes out of it, without tensors' files: the small state."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from hybrid_strategy.checkpoint.encoding import decode, encode, plain, same
from hybrid_strategy.checkpoint.folder import FORMAT_VERSION, META_FILE, PLAN_FILE, RANDOM_FILE, REPLICATED_FILE, STATE_FILE
from hybrid_strategy.checkpoint.pieces import Piece
from hybrid_strategy.errors import CheckpointError, message


@dataclass
class CheckpointContent:
    """What one rank gives to a checkpoint.

    Attributes:
        tensors: this rank's blocks by key (`pieces.model_key`, `pieces.optimizer_key`).
        replicated: values that are not split, by a key that names the parameter they belong to: `optimizer.<name>.step`,
            `settings.<name>` for the hyper-parameters of its group. Ranks give those of the parameters they hold; ranks that give
            the same key must give equal values.
        random_state: random states by logical coordinate; likewise united over the ranks.
        state: state of loops, callbacks, schedulers, scaler. Rank 0's is written.
        plan: the plan as JSON data. Rank 0's is written.
        meta: JSON data read without reading the rest: `global_step`, `epoch`, `score`, data position. Rank 0's is written.
    """

    tensors: dict[str, Piece]
    replicated: dict[str, Any] = field(default_factory=dict)
    random_state: dict[str, Any] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)
    plan: dict[str, Any] = field(default_factory=dict)
    meta: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class SmallState:
    """The small state of a checkpoint as read: the fields of `CheckpointContent`, united over the ranks that wrote it.

    Attributes:
        unsaved: values that were not data and could not be kept, as `<where>: <class>`.
        versions: of the packages that wrote it.
        world_size: number of ranks that wrote it.
    """

    replicated: dict[str, Any]
    random_state: dict[str, Any]
    state: dict[str, Any]
    plan: dict[str, Any]
    meta: dict[str, Any]
    unsaved: tuple[str, ...]
    versions: dict[str, str]
    world_size: int


@dataclass(frozen=True)
class Contribution:
    """One rank's small state as plain data, on its way to rank 0."""

    replicated: dict[str, Any]
    random_state: dict[str, Any]
    unsaved: list[str]

    @staticmethod
    def of(content: CheckpointContent) -> Contribution:
        replicated, unsaved = plain(content.replicated, "replicated")
        random_state, more = plain(content.random_state, "random_state")
        return Contribution(replicated, random_state, unsaved + more)


def small_files(content: CheckpointContent, contributions: list[Contribution]) -> tuple[dict[str, bytes], tuple[str, ...]]:
    """The small files of a checkpoint by name, and what could not be kept.

    Args:
        content: rank 0's.
        contributions: of all ranks, in order.

    Raises:
        CheckpointError: two ranks give different values for one key.
    """
    state, unsaved = plain(content.state)
    unsaved = list(dict.fromkeys(unsaved + [line for each in contributions for line in each.unsaved]))
    meta = {
        "format_version": FORMAT_VERSION,
        "created_seconds": time.time(),
        "world_size": len(contributions),
        "versions": _versions(),
        "unsaved": unsaved,
        "meta": content.meta,
    }
    files = {
        STATE_FILE: encode(state),
        REPLICATED_FILE: encode(_unite("replicated", [each.replicated for each in contributions])),
        RANDOM_FILE: encode(_unite("random_state", [each.random_state for each in contributions])),
        PLAN_FILE: json.dumps(content.plan, indent=1).encode(),
        META_FILE: json.dumps(meta, indent=1).encode(),
    }
    return files, tuple(unsaved)


def read_small_state(folder: Path) -> SmallState:
    """Raises:
    CheckpointError: a file is missing, damaged, or holds something that is not data; names it.
    """
    meta = read_json(folder, META_FILE)
    return SmallState(
        replicated=_read_data(folder, REPLICATED_FILE),
        random_state=_read_data(folder, RANDOM_FILE),
        state=_read_data(folder, STATE_FILE),
        plan=read_json(folder, PLAN_FILE),
        meta=meta["meta"],
        unsaved=tuple(meta["unsaved"]),
        versions=meta["versions"],
        world_size=meta["world_size"],
    )


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """A JSON file of a checkpoint.

    Raises:
        CheckpointError: it cannot be read.
    """
    try:
        found: dict[str, Any] = json.loads((folder / name).read_text())
    except (OSError, ValueError) as error:
        raise _unreadable(folder, name, error) from error
    return found


def _read_data(folder: Path, name: str) -> dict[str, Any]:
    try:
        found: dict[str, Any] = decode((folder / name).read_bytes())
    except Exception as error:  # torch.load raises many kinds for a damaged file
        raise _unreadable(folder, name, error) from error
    return found


def _unreadable(folder: Path, name: str, error: Exception) -> CheckpointError:
    cause = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return CheckpointError(
        message("checkpoint", str(folder), f"its file {name} cannot be read", cause, "Load another checkpoint")
    )


def _unite(what: str, parts: list[Mapping[str, Any]]) -> dict[str, Any]:
    """One mapping of all ranks' keys, in order of name so that it does not depend on the layout."""
    united: dict[str, tuple[int, Any]] = {}
    for rank, part in enumerate(parts):
        for key, value in part.items():
            first, known = united.setdefault(key, (rank, value))
            if not same(known, value):
                numbers = f"Rank {first} has {_short(known)}, rank {rank} has {_short(value)}"
                raise CheckpointError(message(what, key, "the ranks hold different values for it", numbers, ""))
    return {key: united[key][1] for key in sorted(united)}


def _short(value: Any) -> str:
    return repr(value).replace("\n", " ")[:80]


def _versions() -> dict[str, str]:
    try:
        own = version("hybrid-strategy")
    except PackageNotFoundError:
        own = "unknown"
    return {"hybrid-strategy": own, "torch": str(torch.__version__), "python": platform.python_version()}
