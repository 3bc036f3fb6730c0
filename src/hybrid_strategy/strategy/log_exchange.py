"""Combines what a step logged over the data-parallel ranks and hands it along the pipeline, with what the step returned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybrid_strategy.distributed.groups import Groups
from hybrid_strategy.strategy.log_records import METRIC, Contribution, Entry, Records

_EXTREMES = ("max", "min", METRIC)


@dataclass(frozen=True)
class Combined:
    """What every rank gets.

    Attributes:
        entries: the logged names.
        values: their values over all samples of the step.
        weights: sum of what was combined; 0: nothing of this name counted.
        batch_sizes: what Lightning weighs each value by in the mean of an epoch.
        sums: the step's own sums.
        outputs: what the step returned on the last stage, with a `Leaf` for every tensor.
    """

    entries: tuple[Entry, ...]
    values: Tensor
    weights: Tensor
    batch_sizes: Tensor
    sums: Tensor
    outputs: Any


class LogExchange:
    """Combines records over data-parallel ranks and hands the result along the pipeline.

    In the usual case, where ranks log the same names as in the step before, this is one all-reduce over the data-parallel ranks
    and one broadcast along the pipeline. Otherwise the names are agreed on first.
    """

    def __init__(self, groups: Groups, device: torch.device, last_stage_rank: int) -> None:
        self._groups, self._device = groups, device
        self._entries: tuple[Entry, ...] = ()
        self._sent: tuple[tuple[Entry, ...], Any] | None = None
        self._last = groups.layout.pipeline_parallel_size == 1 or groups.coordinate.pipeline_parallel == last_stage_rank
        self._last_stage_rank = last_stage_rank

    def combine(self, records: Records, sums: Sequence[Tensor], own: Sequence[float], outputs: Any) -> Combined:
        """Combined values on every rank; a collective call.

        Args:
            records: what this rank logged (empty off the last stage).
            sums: numbers to be summed over the data-parallel ranks.
            own: numbers of this data-parallel rank that only travel along the pipeline.
            outputs: plain data of this data-parallel rank that only travels along the pipeline.
        """
        entries, flat = self._over_data(records, sums) if self._last else ((), torch.zeros(0, device=self._device))
        flat = torch.cat([flat, self._tensor(own)]) if self._last and own else flat
        if self._groups.upward is not None:
            entries, flat, outputs = self._along_pipeline(entries, flat, outputs, len(sums) + len(own))
        return _unpack(entries, flat, len(sums), len(own), outputs)

    def _tensor(self, numbers: Sequence[float]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.float64, device=self._device)

    # ------------------------------------------------------------------------------------- over data-parallel ranks

    def _over_data(self, records: Records, sums: Sequence[Tensor]) -> tuple[tuple[Entry, ...], Tensor]:
        mine = tuple(records)
        if self._groups.data is None:
            return mine, _signed(self._flat(records, mine, sums), mine)
        same = mine == self._entries
        flat = self._flat(records if same else {}, self._entries, sums)
        summed = self._reduce(torch.cat([self._tensor([float(same)]), flat]), self._entries)
        if summed[0].item() == self._groups.layout.data_parallel_size:
            return self._entries, _signed(summed[1:], self._entries)
        lists: list[tuple[Entry, ...] | None] = [None] * self._groups.layout.data_parallel_size
        dist.all_gather_object(lists, mine, group=self._groups.data)
        self._entries = tuple(dict.fromkeys(entry for each in lists if each for entry in each))
        return self._entries, _signed(self._reduce(self._flat(records, self._entries, sums), self._entries), self._entries)

    def _flat(self, records: Records, entries: Sequence[Entry], sums: Sequence[Tensor]) -> Tensor:
        """`[sums..., weights..., batch sizes..., values...]`; a minimum travels as the maximum of its negative."""
        found = [records.get(entry, Contribution()) for entry in entries]
        head = [each.to(device=self._device, dtype=torch.float64).reshape(()) for each in sums]
        weights = [sum(each.weights) for each in found]
        sizes = [sum(each.batch_sizes) for each in found]
        values = [_local(entry.reduction, each, self._device) for entry, each in zip(entries, found, strict=True)]
        numbers = torch.cat([self._tensor(weights), self._tensor(sizes)])
        return torch.cat([*(each.reshape(1) for each in head), numbers, *(each.reshape(1) for each in values)])

    def _reduce(self, flat: Tensor, entries: Sequence[Entry]) -> Tensor:
        first = len(flat) - len(entries)
        extreme = [first + index for index, entry in enumerate(entries) if entry.reduction in _EXTREMES]
        if not extreme:
            dist.all_reduce(flat, group=self._groups.data)
            return flat
        tops = flat[extreme]
        flat[extreme] = 0.0
        dist.all_reduce(flat, group=self._groups.data)
        dist.all_reduce(tops, op=dist.ReduceOp.MAX, group=self._groups.data)
        flat[extreme] = tops
        return flat

    # ------------------------------------------------------------------------------------------ along the pipeline

    def _along_pipeline(
        self, entries: tuple[Entry, ...], flat: Tensor, outputs: Any, num_numbers: int
    ) -> tuple[tuple[Entry, ...], Tensor, Any]:
        """From the last stage to all; what was sent in the step before is not sent again, only the numbers are."""
        known = self._sent
        length = 1 + (num_numbers + 3 * len(known[0]) if known is not None else 0)
        packet = torch.zeros(length, dtype=torch.float64, device=self._device)
        if self._last and known is not None and _alike((entries, outputs), known):
            packet[0] = 1.0
            packet[1:] = flat
        source = self._last_stage_rank
        dist.broadcast(packet, group_src=source, group=self._groups.upward)
        if packet[0].item() == 1.0 and known is not None:
            return known[0], packet[1:], known[1]
        box: list[Any] = [(entries, flat.tolist(), outputs)]
        dist.broadcast_object_list(box, group_src=source, group=self._groups.upward)
        entries, numbers, outputs = box[0]
        self._sent = entries, outputs
        return entries, self._tensor(numbers), outputs


def _alike(left: Any, right: Any) -> bool:
    """Equality that a user's own objects may not be able to tell."""
    try:
        return bool(left == right)
    except Exception:  # whatever their `__eq__` raises: then the value is sent again
        return False


def _local(reduction: str, found: Contribution, device: torch.device) -> Tensor:
    """How one rank's values of an entry travel; a value of weight zero does not count, not even as NaN."""
    if reduction in _EXTREMES:
        top = torch.full((), -torch.inf, dtype=torch.float64, device=device)
        for value in found.values:
            top = torch.maximum(top, value.to(device) if reduction != "min" else -value.to(device))
        return top
    total = torch.zeros((), dtype=torch.float64, device=device)
    for value, weight in zip(found.values, found.weights, strict=True):
        if reduction == "sum":
            total = total + value.to(device)
        elif weight != 0:
            total = total + value.to(device) * weight
    return total


def _signed(flat: Tensor, entries: Sequence[Entry]) -> Tensor:
    first = len(flat) - len(entries)
    least = [first + index for index, entry in enumerate(entries) if entry.reduction == "min"]
    if least:
        flat[least] = -flat[least]
    return flat


def _unpack(entries: tuple[Entry, ...], flat: Tensor, num_sums: int, num_own: int, outputs: Any) -> Combined:
    count = len(entries)
    sizes = [num_sums, count, count, count, num_own]
    sums, weights, batch_sizes, values, own = flat.split(sizes)
    means = [index for index, entry in enumerate(entries) if entry.reduction == "mean"]
    values = values.clone()
    values[means] = values[means] / weights[means]
    return Combined(entries, values, weights, batch_sizes, torch.cat([sums, own]), outputs)
