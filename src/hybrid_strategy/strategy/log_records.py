"""What the micro-batches of a step logged on this rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

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
METRIC, UNKNOWN = "metric", "unknown"
_TRAVEL_WITH_ENTRY = ("prog_bar", "logger", "on_step", "on_epoch", "add_dataloader_idx", "metric_attribute", "rank_zero_only")


def reduction_of(reduce_fx: Any) -> str:
    """`mean`, `sum`, `min`, `max`, or `unknown`: Lightning raises its own error when such a one is replayed."""
    word = reduce_fx.lower() if isinstance(reduce_fx, str) else reduce_fx
    try:
        return _REDUCTIONS.get(word, UNKNOWN)
    except TypeError:
        return UNKNOWN


@dataclass(frozen=True)
class Entry:
    """One logged name of one hook, and how its values combine; `options` are those of Lightning's store that matter elsewhere."""

    fx: str
    name: str
    reduction: str
    options: tuple[tuple[str, Any], ...]

    @staticmethod
    def of(fx: str, name: str, value: Any, options: Mapping[str, Any]) -> Entry:
        reduction = METRIC if isinstance(value, Metric) else reduction_of(options.get("reduce_fx", "mean"))
        return Entry(fx, name, reduction, tuple((key, options[key]) for key in _TRAVEL_WITH_ENTRY if key in options))

    def option(self, key: str) -> Any:
        return dict(self.options).get(key)

    @property
    def given_options(self) -> dict[str, Any]:
        """Keyword arguments of `self.log` that would make this entry."""
        return {**dict(self.options), "reduce_fx": self.reduction, "sync_dist": True}

    @property
    def store_options(self) -> dict[str, Any]:
        """Keyword arguments of Lightning's store.

        The values are combined already: `sync_dist` without a function reduces nothing, and no advice to set it is given.
        """
        reduce_fx = "mean" if self.reduction == METRIC else self.reduction
        return {**dict(self.options), "reduce_fx": reduce_fx, "sync_dist": True}


@dataclass
class Contribution:
    """Values of one entry with the weights that combine them, and the batch size that Lightning weighs their mean by."""

    values: list[Tensor] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    batch_sizes: list[float] = field(default_factory=list)
    metric: Any = None

    def add(self, value: Tensor, weight: float, batch_size: float) -> None:
        self.values.append(value)
        self.weights.append(weight)
        self.batch_sizes.append(batch_size)


Records = dict[Entry, Contribution]


class LogRecorder:
    """Keeps what a step logs while it runs on one micro-batch."""

    def __init__(self) -> None:
        self.active = False
        self.latest: Entry | None = None
        self._records: Records = {}
        self._now: list[tuple[Entry, Any, float | None]] = []
        self._early: list[tuple[Entry, Tensor, float]] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Records one micro-batch; the records count when `commit` is called."""
        self._now, self.active = [], True
        try:
            yield
        finally:
            self.active = False

    def record(self, fx: str, name: str, value: Any, options: Mapping[str, Any]) -> None:
        entry = Entry.of(fx, name, value, options)
        own = options.get("batch_size")
        kept = value if entry.reduction == METRIC else value.detach().double()
        self.add(entry, kept, None if own is None else float(own))

    def add(self, entry: Entry, value: Any, batch_size: float | None) -> None:
        """Keeps a value (fp64 and detached, or a metric object) of a name whose options are known."""
        self.latest = entry
        self._now.append((entry, value, batch_size))

    @property
    def values_at_hand(self) -> dict[str, Tensor]:
        """What the last micro-batch logged, by name."""
        return {entry.name: value for entry, value, _ in self._now if entry.reduction != METRIC}

    @property
    def metrics_at_hand(self) -> set[str]:
        """Names of the metric objects that the last micro-batch logged."""
        return {entry.name for entry, _, _ in self._now if entry.reduction == METRIC}

    def commit(self, rows: float, weight: float, counts: bool = True) -> None:
        """Keeps what the last micro-batch logged.

        Args:
            rows: samples of the micro-batch: its batch size, where the user gave none.
            weight: what its values weigh in the step's value, where the user gave no batch size: rows, or tokens.
            counts: whether its samples count at all; a row of padding does not, but a metric object is logged all the same.
        """
        for entry, value, own in self._now:
            if entry.reduction == METRIC:
                self._records.setdefault(entry, Contribution()).metric = value
            elif counts:
                found = self._records.setdefault(entry, Contribution())
                found.add(value, weight if own is None else own, rows if own is None else own)
        self._now = []

    def leave_early(self, rows: float, counts: bool) -> None:
        """The step ended before its end, at the end of a stage: layers may have logged there what the last stage does not log."""
        known = [each for each in self._now if counts and each[0].reduction not in (METRIC, UNKNOWN)]
        self._early += [(entry, value, rows if own is None else own) for entry, value, own in known]
        self._now = []

    def take_early(self) -> list[tuple[Entry, Tensor, float]]:
        """Names, values and batch sizes of what was logged on earlier stages."""
        early, self._early = self._early, []
        return early

    def take(self) -> Records:
        records, self._records = self._records, {}
        return records
