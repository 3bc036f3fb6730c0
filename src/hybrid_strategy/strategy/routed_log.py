"""`self.log` under pipelines and data parallelism: recorded where the step runs, combined, and replayed on every rank.

Within a step every call of `self.log` is recorded, once a micro-batch, on the ranks that hold the last stage. The records are
combined over micro-batches and data-parallel ranks as one process would have computed them for all samples at once, sent along
the pipeline, and handed to Lightning's own `log` with the user's options.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hybrid_strategy.distributed.groups import Groups
from hybrid_strategy.errors import ConfigError, message

_REDUCTIONS = {
    "mean": "mean",
    "avg": "mean",
    "sum": "sum",
    "max": "max",
    "min": "min",
    torch.mean: "mean",
    torch.sum: "sum",
    torch.max: "max",
    torch.min: "min",
    max: "max",
    min: "min",
    sum: "sum",
}


@dataclass(frozen=True)
class Entry:
    """One logged name and how its values combine; `options` are the user's keyword arguments."""

    name: str
    reduction: str
    options: tuple[tuple[str, Any], ...]


@dataclass
class Records:
    """What a step's micro-batches logged on this rank: per entry the values and their weights (rows or tokens)."""

    values: dict[Entry, list[Tensor]] = field(default_factory=dict)
    weights: dict[Entry, list[float]] = field(default_factory=dict)
    metrics: dict[str, tuple[Any, dict[str, Any]]] = field(default_factory=dict)


class LogRecorder:
    """Stands in for a module's `log` while its step runs on one micro-batch."""

    def __init__(self, module: nn.Module, pipelined: bool) -> None:
        self._module, self._pipelined = module, pipelined
        self._records = Records()
        self._now: list[tuple[Entry, Tensor, float | None]] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Records one micro-batch; the records count when `commit` is called."""
        self._now = []
        object.__setattr__(self._module, "log", self._record)
        try:
            yield
        finally:
            object.__delattr__(self._module, "log")

    def commit(self, weight: float) -> None:
        """Keeps what the last micro-batch logged; `weight` counts where the user gave no batch size."""
        for entry, value, own in self._now:
            self._records.values.setdefault(entry, []).append(value)
            self._records.weights.setdefault(entry, []).append(weight if own is None else own)
        self._now = []

    def take(self) -> Records:
        records, self._records = self._records, Records()
        return records

    def _record(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        options.update(zip(("prog_bar", "logger", "on_step", "on_epoch", "reduce_fx"), args, strict=False))
        if hasattr(value, "compute") and hasattr(value, "update"):
            self._record_metric(name, value, options)
            return
        reduction = _REDUCTIONS.get(options.get("reduce_fx", "mean"))
        if reduction is None:
            raise ConfigError(
                message(
                    f"self.log({name!r}, reduce_fx)",
                    options["reduce_fx"],
                    "values of several micro-batches and ranks are combined by mean, sum, min or max",
                    "",
                    "Use one of these words, or a torchmetrics object",
                )
            )
        weight = options.pop("batch_size", None)
        tensor = value.detach() if isinstance(value, Tensor) else torch.tensor(float(value))
        entry = Entry(name, reduction, tuple(sorted(options.items(), key=lambda item: item[0])))
        self._now.append((entry, tensor.double().reshape(()), None if weight is None else float(weight)))

    def _record_metric(self, name: str, value: Any, options: dict[str, Any]) -> None:
        if self._pipelined:
            raise ConfigError(
                message(
                    f"self.log({name!r})",
                    type(value).__name__,
                    "a metric object cannot be logged from a pipeline stage yet",
                    "only the last stage updates it",
                    "Log its value: self.log(name, metric(preds, target))",
                )
            )
        self._records.metrics[name] = (value, options)


@dataclass(frozen=True)
class Combined:
    """What every rank gets: the entries with their values and weights over all samples, and the step's own sums."""

    entries: tuple[Entry, ...]
    values: Tensor
    weights: Tensor
    sums: Tensor


class LogExchange:
    """Combines records over data-parallel ranks and hands the result along the pipeline.

    In the usual case, where ranks log the same names as in the step before, this is one all-reduce over the data-parallel ranks
    and one broadcast along the pipeline. Otherwise the names are agreed on first.
    """

    def __init__(self, groups: Groups, device: torch.device, last_stage_rank: int) -> None:
        self._groups, self._device = groups, device
        self._entries: tuple[Entry, ...] = ()
        self._sent_entries: tuple[Entry, ...] | None = None
        self._last = groups.layout.pipeline_parallel_size == 1 or groups.coordinate.pipeline_parallel == last_stage_rank
        self._last_stage_rank = last_stage_rank

    def combine(self, records: Records, sums: Sequence[Tensor], own: Sequence[float] = ()) -> Combined:
        """Combined values on every rank; a collective call.

        Args:
            records: what this rank logged (empty off the last stage).
            sums: numbers to be summed over the data-parallel ranks.
            own: numbers of this data-parallel rank that only travel along the pipeline.
        """
        rows = self._gather_data(records, sums) if self._last else None
        return self._along_pipeline(rows, sums, own)

    def _gather_data(self, records: Records, sums: Sequence[Tensor]) -> tuple[tuple[Entry, ...], Tensor]:
        mine = tuple(records.values)
        if self._groups.data is None:
            return mine, self._flat(records, mine, sums)
        same = mine == self._entries
        flat = self._flat(records, self._entries, sums) if same else self._flat(Records(), self._entries, sums)
        flat = torch.cat([torch.tensor([float(same)], dtype=torch.float64, device=self._device), flat])
        summed = self._reduce(flat, self._entries)
        if summed[0].item() == self._groups.layout.data_parallel_size:
            return self._entries, summed[1:]
        return self._agree(records, mine, sums)

    def _agree(self, records: Records, mine: tuple[Entry, ...], sums: Sequence[Tensor]) -> tuple[tuple[Entry, ...], Tensor]:
        """The slow way: the union of all names, in an order that all ranks share."""
        lists: list[tuple[Entry, ...] | None] = [None] * self._groups.layout.data_parallel_size
        dist.all_gather_object(lists, mine, group=self._groups.data)
        self._entries = tuple(dict.fromkeys(entry for each in lists if each for entry in each))
        return self._entries, self._reduce(self._flat(records, self._entries, sums), self._entries, offset=0)

    def _flat(self, records: Records, entries: Sequence[Entry], sums: Sequence[Tensor]) -> Tensor:
        """`[sums..., weights..., values...]`; a mean travels as its weighted sum, a minimum as the maximum of its negative."""
        weights, values = [], []
        for entry in entries:
            own = torch.tensor(records.weights.get(entry, []), dtype=torch.float64, device=self._device)
            given = records.values.get(entry)
            numbers = torch.stack([each.to(self._device) for each in given]) if given else own
            weights.append(own.sum())
            values.append(_local(entry.reduction, numbers, own))
        head = [each.to(device=self._device, dtype=torch.float64).reshape(()) for each in sums]
        parts = [*head, *weights, *values]
        return torch.stack(parts) if parts else torch.zeros(0, dtype=torch.float64, device=self._device)

    def _reduce(self, flat: Tensor, entries: Sequence[Entry], offset: int = 1) -> Tensor:
        extreme = [index for index, entry in enumerate(entries) if entry.reduction in ("max", "min")]
        first = len(flat) - len(entries)
        tops = flat[[first + index for index in extreme]] if extreme else None
        if extreme:
            flat[[first + index for index in extreme]] = 0.0
        dist.all_reduce(flat, group=self._groups.data)
        if tops is not None:
            dist.all_reduce(tops, op=dist.ReduceOp.MAX, group=self._groups.data)
            flat[[first + index for index in extreme]] = tops
        return flat

    def _along_pipeline(
        self, rows: tuple[tuple[Entry, ...], Tensor] | None, sums: Sequence[Tensor], own: Sequence[float]
    ) -> Combined:
        entries, flat = rows if rows is not None else ((), torch.zeros(0))
        if self._groups.upward is not None:
            entries, flat = self._broadcast(entries, flat, len(sums), own)
        elif own:
            flat = torch.cat([flat, torch.tensor(own, dtype=torch.float64, device=self._device)])
        return _unpack(entries, flat, len(sums), len(own))

    def _broadcast(
        self, entries: tuple[Entry, ...], flat: Tensor, num_sums: int, own: Sequence[float]
    ) -> tuple[tuple[Entry, ...], Tensor]:
        known = self._sent_entries
        if self._last:
            flat = torch.cat([flat, torch.tensor(own, dtype=torch.float64, device=self._device)])
        length = (num_sums + 2 * len(known) + len(own) if known is not None else 0) + 1
        packet = torch.zeros(length, dtype=torch.float64, device=self._device)
        if self._last and entries == known:
            packet[0] = 1.0
            packet[1:] = flat
        source = self._last_stage_rank
        dist.broadcast(packet, group_src=source, group=self._groups.upward)
        if packet[0].item() == 1.0 and known is not None:
            return known, packet[1:]
        box: list[Any] = [(entries, flat.tolist())]
        dist.broadcast_object_list(box, group_src=source, group=self._groups.upward)
        self._sent_entries = box[0][0]
        return box[0][0], torch.tensor(box[0][1], dtype=torch.float64, device=self._device)


def _local(reduction: str, numbers: Tensor, weights: Tensor) -> Tensor:
    """How one rank's values of an entry travel."""
    if reduction == "mean":
        return (numbers * weights).sum()
    if reduction == "sum":
        return numbers.sum()
    signed = numbers if reduction == "max" else -numbers
    return signed.max() if len(signed) else torch.full((), -torch.inf, dtype=torch.float64, device=numbers.device)


def _unpack(entries: tuple[Entry, ...], flat: Tensor, num_sums: int, num_own: int) -> Combined:
    count = len(entries)
    sums = torch.cat([flat[:num_sums], flat[len(flat) - num_own :]]) if num_own else flat[:num_sums]
    weights = flat[num_sums : num_sums + count]
    values = flat[num_sums + count : num_sums + 2 * count].clone()
    for index, entry in enumerate(entries):
        if entry.reduction == "mean":
            values[index] = values[index] / weights[index]
        elif entry.reduction == "min":
            values[index] = -values[index]
    return Combined(entries, values, weights, sums)


def replay(combined: Combined, metrics: Mapping[str, tuple[Any, dict[str, Any]]], log: Callable[..., None]) -> None:
    """Hands every combined value, and every metric object, to Lightning's own `log`, with the user's options."""
    for name, (metric, options) in metrics.items():
        log(name, metric, **options)
    for index, entry in enumerate(combined.entries):
        options = dict(entry.options)
        options["sync_dist"] = False
        weight = combined.weights[index].item()
        log(entry.name, combined.values[index].float(), **options, batch_size=max(int(weight), 1))
