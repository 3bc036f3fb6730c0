"""`self.log` outside of steps, where ranks may log different values, or only some of them a name.

A value is stored at once, as in one process. After the last hook of a batch or epoch the ranks exchange what they logged and
put the combined value in the place of their own: the mean (sum, minimum, maximum) over data-parallel coordinates, each of them
spoken for by one rank, so that tensor- and pipeline-parallel copies count once, and a name that only some ranks logged is known
to all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor

from hybrid_strategy.distributed.groups import Groups
from hybrid_strategy.strategy import _lightning_results as store
from hybrid_strategy.strategy.log_records import METRIC, UNKNOWN, Contribution, Entry

_STEPS = ("training_step", "validation_step", "test_step", "predict_step")


@dataclass(frozen=True)
class HookEntry:
    """One name logged by one hook; `synchronised` is the user's `sync_dist`."""

    entry: Entry
    dataloader_idx: int | None
    synchronised: bool


@dataclass
class _Pending:
    stored: store.Stored
    found: Contribution


@dataclass
class _Agreement:
    """What the ranks found out the last time they compared names: their union, and for which of them this rank speaks."""

    mine: tuple[HookEntry, ...] = ()
    union: tuple[HookEntry, ...] = ()
    speaks: tuple[bool, ...] = ()


@dataclass
class _Book:
    """What waits to be exchanged of one loop's values."""

    pending: dict[HookEntry, _Pending] = field(default_factory=dict)
    agreements: dict[str, _Agreement] = field(default_factory=dict)


class HookLog:
    """Values logged outside of steps.

    Args:
        trainer: whose values they are.
        groups: this rank's place.
        device: where numbers are reduced.
        speaker: the pipeline rank that speaks for its data-parallel coordinate where it has a value.
        rows_of: samples in a batch that count on this rank.
    """

    def __init__(
        self, trainer: pl.Trainer, groups: Groups, device: torch.device, speaker: int, rows_of: Callable[[Any], float]
    ) -> None:
        self._trainer, self._groups, self._device = trainer, groups, device
        self._speaker, self._rows_of = speaker, rows_of
        self._books: dict[int, _Book] = {}
        self.before_step = False

    def log(self, results: Any, own: Callable[..., None], fx: str, name: str, value: Any, options: dict[str, Any]) -> None:
        """Stores this rank's value and keeps it in mind for the next exchange."""
        entry = Entry.of(fx, name, value, options)
        if options.get("rank_zero_only") or entry.reduction == UNKNOWN:
            own(fx, name, value, **options)
            return
        batch_size = options.get("batch_size")
        rows = None if results.batch is None else self._rows_of(results.batch)
        if batch_size is None or rows == 0:  # a batch of padding counts nothing, whatever its size is said to be
            batch_size = rows
        key = HookEntry(entry, results.dataloader_idx, bool(options.get("sync_dist")))
        stored = store.remember(results, store.storage_key(results, fx, name, bool(entry.option("add_dataloader_idx"))))
        own(fx, name, value, **entry.store_options, batch_size=batch_size)
        pending = self._book(results).pending.setdefault(key, _Pending(stored, Contribution()))
        if entry.reduction == METRIC:
            pending.found.metric = value
        elif rows != 0:
            weight = 1.0 if batch_size is None else float(batch_size)
            pending.found.add(value.detach().double().reshape(()), weight, weight)

    def exchange(self, point: str) -> None:
        """Combines what is pending of the present loop; a collective call of all ranks.

        Args:
            point: `before_step`, `batch_end` or `epoch_end`: the ranks' names are remembered for each.
        """
        results = store.current_results(self._trainer)
        if results is None:
            return
        book = self._book(results)
        agreement = book.agreements.setdefault(point, _Agreement())
        mine, pending = tuple(book.pending), book.pending
        book.pending = {}
        numbers = self._reduced(agreement, mine, pending)
        if numbers is None:
            agreement = book.agreements[point] = self._agree(mine)
            numbers = self._reduced(agreement, mine, pending)
        if numbers is not None:
            self._apply(results, agreement, pending, *numbers)
        if point == "batch_end" and any(_comes_before_step(each.entry.fx) for each in agreement.union):
            self.before_step = True

    def _book(self, results: Any) -> _Book:
        return self._books.setdefault(id(results), _Book())

    def _reduced(
        self, agreement: _Agreement, mine: tuple[HookEntry, ...], pending: dict[HookEntry, _Pending]
    ) -> tuple[Tensor, Tensor] | None:
        """Values and weights of the agreed names, or `None` where a rank has logged others."""
        totals, tops = [float(mine != agreement.mine), float(self._trainer.should_stop)], []
        for key, speaks in zip(agreement.union, agreement.speaks, strict=True):
            found = pending[key].found if speaks and key in pending else Contribution()
            value, weight, top = self._contribution(key, found)
            totals += [value, weight]
            tops.append(top)
        summed = torch.tensor(totals, dtype=torch.float64, device=self._device)
        dist.all_reduce(summed)
        if summed[1].item():
            self._trainer.should_stop = True  # a hook of some rank has asked for it: all stop at the same batch
        if summed[0].item():
            return None
        values, weights = summed[2::2], summed[3::2]
        extreme = [index for index, key in enumerate(agreement.union) if key.entry.reduction in ("max", "min")]
        if extreme:
            highest = torch.tensor([tops[index] for index in extreme], dtype=torch.float64, device=self._device)
            dist.all_reduce(highest, op=dist.ReduceOp.MAX)
            values[extreme] = highest
        return values.cpu(), weights.cpu()

    def _contribution(self, key: HookEntry, found: Contribution) -> tuple[float, float, float]:
        """A rank's part of the weighted sum, of the weights, and of the maximum (of the negative, for a minimum)."""
        numbers = [float(value) for value in found.values]
        kind = key.entry.reduction
        if kind in ("max", "min"):
            signed = [number if kind == "max" else -number for number in numbers]
            return 0.0, sum(found.weights), max(signed, default=float("-inf"))
        if kind == "sum":
            counted = key.synchronised or self._groups.coordinate.data_parallel == 0
            return (sum(numbers), sum(found.weights), 0.0) if counted else (0.0, 0.0, 0.0)
        pairs = [(number * weight, weight) for number, weight in zip(numbers, found.weights, strict=True) if weight]
        return sum(each for each, _ in pairs), sum(weight for _, weight in pairs), 0.0

    def _agree(self, mine: tuple[HookEntry, ...]) -> _Agreement:
        lists: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(lists, mine)
        union = tuple(dict.fromkeys(key for each in lists for key in each))
        return _Agreement(mine, union, tuple(self._groups.rank == self._voice(lists, key) for key in union))

    def _voice(self, lists: Sequence[tuple[HookEntry, ...]], key: HookEntry) -> int | None:
        """Which rank of this rank's data-parallel coordinate speaks for it: of the last stage if it has the name."""
        layout = self._groups.layout
        here = self._groups.coordinate.data_parallel
        able = [rank for rank, names in enumerate(lists) if key in names and layout.coordinate(rank).data_parallel == here]
        return min(able, key=lambda rank: (layout.coordinate(rank).pipeline_parallel != self._speaker, rank), default=None)

    def _apply(
        self, results: Any, agreement: _Agreement, pending: dict[HookEntry, _Pending], values: Tensor, weights: Tensor
    ) -> None:
        index = results.dataloader_idx
        begun = {*_STEPS, *(key.entry.fx for key in pending)}  # hooks of which this rank has stored values of its own already
        for key, value, weight in zip(agreement.union, values, weights, strict=True):
            number = -value if key.entry.reduction == "min" else value
            number = number / weight if key.entry.reduction == "mean" and weight else number
            results.dataloader_idx = key.dataloader_idx
            if key.entry.reduction == METRIC:
                if key not in pending:
                    metric: Any = self._trainer.lightning_module.get_submodule(key.entry.option("metric_attribute"))
                    self._store(results, key.entry, metric, 1.0, begun)
            elif key in pending:
                store.replace_contribution(results, pending[key].stored, as_logged(number), weight.item())
            else:
                self._store(results, key.entry, as_logged(number).to(self._device), weight.item(), begun)
        results.dataloader_idx = index

    def _store(self, results: Any, entry: Entry, value: Any, batch_size: float, begun: set[str]) -> None:
        if entry.fx not in begun:
            store.start_of_epoch_reset(self._trainer, entry.fx)
            begun.add(entry.fx)
        type(results).log(results, entry.fx, entry.name, value, **entry.store_options, batch_size=batch_size)


def _comes_before_step(fx: str) -> bool:
    """May a callback read this hook's value before the last hook of the batch?"""
    return fx not in ("on_train_batch_end", "on_validation_batch_end", "on_test_batch_end")


def as_logged(number: Tensor) -> Tensor:
    """In the type that Lightning stores."""
    return number if torch.get_default_dtype() == torch.float64 else number.float()
