"""Reads what the processes wrote down: one tensor of one kind and step at a time, whole, from the pieces of all ranks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from hybrid_strategy.errors import DataError, message
from hybrid_strategy.parity.files import RECORD_FILE, rank_folder, tensor_file
from hybrid_strategy.spec.shard import ShardSpec


@dataclass(frozen=True)
class Piece:
    """What one rank holds of a tensor; `value` is `None` where it has none (no gradient)."""

    rank: int
    spec: ShardSpec
    value: Tensor | None


@dataclass
class Whole:
    """A tensor put together from its pieces.

    Attributes:
        value: the whole; where ranks hold the same block, the first one's. `None`: no rank has any of it.
        covered: which elements some rank has.
        pieces: what every rank holds.
        spread: largest difference between ranks that hold the same elements.
        has_copies: some elements are held by more than one rank.
    """

    name: str
    value: Tensor | None
    covered: Tensor
    pieces: list[Piece] = field(default_factory=list)
    spread: float = 0.0
    has_copies: bool = False

    @property
    def is_complete(self) -> bool:
        return bool(self.covered.all())


def put_together(name: str, pieces: list[Piece]) -> Whole:
    """The whole tensor of these pieces, at least one."""
    shape = pieces[0].spec.full_shape
    covered = torch.zeros(shape, dtype=torch.bool)
    value, spread, copies = None, 0.0, False
    for piece in pieces:
        if piece.value is None:
            continue
        if value is None:
            value = torch.zeros(shape, dtype=piece.value.dtype)
        where = piece.spec.slices
        both = covered[where]
        if both.any():
            copies = True
            spread = max(spread, difference(value[where][both], piece.value[both]))
        value[where] = torch.where(both, value[where], piece.value)
        covered[where] = True
    return Whole(name, value, covered, pieces, spread, copies)


def distance(left: Tensor, right: Tensor) -> Tensor:
    """Absolute differences in fp64; not-a-numbers and infinities are equal to themselves and infinitely far from all else."""
    wide_left, wide_right = left.double(), right.double()
    same = (wide_left == wide_right) | (wide_left.isnan() & wide_right.isnan())
    apart = (wide_left - wide_right).abs().nan_to_num(nan=float("inf"), posinf=float("inf"))
    return apart.masked_fill(same, 0.0)


def difference(left: Tensor, right: Tensor) -> float:
    """The largest of `distance`.

    >>> nan, inf = float("nan"), float("inf")
    >>> difference(torch.tensor([nan, inf, 1.0]), torch.tensor([nan, inf, 1.5]))
    0.5
    >>> difference(torch.tensor([nan]), torch.tensor([0.0]))
    inf
    """
    return float(distance(left, right).max()) if left.numel() else 0.0


class RankRecord:
    """What one process wrote down."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.rank, self._folder = rank, rank_folder(folder, rank)
        path = self._folder / RECORD_FILE
        if not path.is_file():  # Lightning has left `fit` before its first batch
            rule, advice = "a check compares steps, and none ran", "Give a training loader of one batch or more"
            raise DataError(message("num_training_batches", 0, rule, "", advice))
        self.facts: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        specs = (ShardSpec(**{key: _tuples(value) for key, value in each.items()}) for each in self.facts["pieces"])
        self.specs = {spec.name: spec for spec in specs}

    @property
    def steps(self) -> list[dict[str, Any]]:
        steps: list[dict[str, Any]] = self.facts["steps"]
        return steps

    def piece(self, name: str, kind: str, step: int | None) -> Piece:
        """This rank's piece of a tensor that it holds a piece of."""
        path = tensor_file(self._folder, kind, step)
        with safe_open(path, framework="pt") as file:
            value = file.get_tensor(name) if name in file.keys() else None  # noqa: SIM118  (safetensors has no `in`)
        return Piece(self.rank, self.specs[name], value)


class RunRecord:
    """What all processes of a run wrote down."""

    def __init__(self, folder: Path, world_size: int) -> None:
        self.ranks = [RankRecord(folder, rank) for rank in range(world_size)]

    @cached_property
    def names(self) -> list[str]:
        """Parameters that some rank holds, in the order of the ranks' models."""
        return list(dict.fromkeys(name for rank in self.ranks for name in rank.specs))

    @property
    def num_steps(self) -> int:
        """Steps that every rank finished."""
        return min(sum(bool(step["weights"]) for step in rank.steps) for rank in self.ranks)

    def whole(self, name: str, kind: str, step: int | None = None) -> Whole:
        """A tensor that some rank holds a piece of."""
        return put_together(name, [rank.piece(name, kind, step) for rank in self.ranks if name in rank.specs])

    def losses(self, step: int) -> Iterator[tuple[int, list[float]]]:
        """(rank, loss of every batch of the step)."""
        return ((rank.rank, rank.steps[step]["losses"]) for rank in self.ranks)

    def norms(self, step: int) -> Iterator[tuple[int, float]]:
        """(rank, gradient norm of the step)."""
        return ((rank.rank, rank.steps[step]["norm"]) for rank in self.ranks)

    def owners(self, name: str) -> Tensor:
        """How many ranks say that they own each element."""
        specs = [rank.specs[name] for rank in self.ranks if name in rank.specs]
        count = torch.zeros(specs[0].full_shape, dtype=torch.int32)
        for spec in specs:
            if spec.owner:
                count[spec.slices] += 1
        return count


def _tuples(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
