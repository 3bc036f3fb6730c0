"""`self.log` in every layout: a logged value is the one that a single process would log for the same samples, on every rank.

What a step logs is recorded on the ranks that hold the last stage, once a micro-batch; combined over micro-batches and
data-parallel ranks; sent along the pipeline; and stored on every rank with the user's options. What other hooks log is
exchanged after them (`hook_log`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from hybrid_strategy.distributed.groups import Groups
from hybrid_strategy.strategy import _lightning_results as store
from hybrid_strategy.strategy.hook_log import HookLog, as_logged
from hybrid_strategy.strategy.log_exchange import Combined, LogExchange
from hybrid_strategy.strategy.log_records import METRIC, Contribution, Entry, LogRecorder, Records
from hybrid_strategy.strategy.quick_log import QuickLog
from hybrid_strategy.strategy.shared_outputs import OutputSharing, Skeleton, skeleton_of
from hybrid_strategy.strategy.step_metrics import StepMetrics
from hybrid_strategy.strategy.whereabouts import Whereabouts


class LogRouter:
    """Stands between `self.log` and Lightning's store of values.

    Args:
        module: the user's module.
        groups: this rank's place.
        device: where numbers are reduced.
        last_stage_rank: the pipeline rank that holds the last stage.
    """

    def __init__(self, module: pl.LightningModule, groups: Groups, device: torch.device, last_stage_rank: int) -> None:
        self._module, self._groups, self._device, self._last_stage_rank = module, groups, device, last_stage_rank
        self.recorder = LogRecorder()
        self.quick = QuickLog(module, self.recorder)
        self.metrics = StepMetrics(module, groups, last_stage_rank)
        self._exchanges: dict[str, LogExchange] = {}
        self._hooks: HookLog | None = None
        self._stored = store.KnownValues()
        is_last = groups.coordinate.pipeline_parallel == last_stage_rank
        self._outputs = None if groups.upward is None else OutputSharing(groups.upward, last_stage_rank, is_last, device)

    def attach(
        self,
        trainer: pl.Trainer,
        rows_of: Callable[[Any], float],
        whereabouts: Whereabouts,
        before: Sequence[Callable[[], None]],
    ) -> None:
        """Routes what `trainer` logs.

        Args:
            rows_of: samples of a batch that count on this rank.
            whereabouts: is told of each exchange.
            before: called by all ranks before each exchange; may raise where one of them is elsewhere.
        """
        self.metrics.attach(trainer.callbacks)  # type: ignore[attr-defined]
        store.tap_results(trainer, self._tap)
        if self._groups.layout.world_size == 1:
            return
        hooks = self._hooks = HookLog(trainer, self._groups, self._device, self._last_stage_rank, rows_of)

        def last_batch() -> None:
            store.compute_metrics(store.current_results(trainer))

        def exchange(point: str) -> None:
            with whereabouts.doing(f"the exchange of what hooks logged, at {point.replace('_', ' ')}"):
                for each in before:
                    each()
                hooks.exchange(point)
            self.metrics.go_on()

        times = store.PublishTimes(
            batch_end=lambda: exchange("batch_end"),
            last_batch=last_batch,
            before_monitors=lambda: exchange("before_monitors"),
            epoch_end=lambda: exchange("epoch_end"),
        )
        store.watch_publishing(trainer, times)

    def before_step_ends(self) -> None:
        """Called once the optimizer has stepped: callbacks of the batch's end read what the hooks before it logged."""
        if self._hooks is not None and self._hooks.before_step:
            self._hooks.exchange("before_step")

    def share(self, kind: str, sums: Sequence[Tensor], own: Sequence[float], outputs: Any) -> tuple[Combined, Any]:
        """Combines and stores what the step logged; returns the step's sums and what it returned. A collective call."""
        records = self.recorder.take()
        values = self._metric_values(records)
        skeleton = Skeleton() if self._outputs is None else skeleton_of(outputs)
        combined = self._exchange(kind).combine(records, sums, own, skeleton)
        for index, entry in enumerate(combined.entries):
            if entry.reduction == METRIC:
                self._store_metric(entry, values.get(entry), combined, index)
            elif combined.weights[index].item():
                batch_size = combined.batch_sizes[index].item()
                self._store(entry, as_logged(combined.values[index]), batch_size)
        self._log_early({(entry.fx, entry.name) for entry in combined.entries})
        return combined, outputs if self._outputs is None else self._outputs.share(f"{kind}_step", outputs, combined.outputs)

    def _log_early(self, known: Collection[tuple[str, str]]) -> None:
        """What layers of earlier stages logged and the last stage did not, as if a hook had logged it."""
        results = store.current_results(self._module.trainer)
        for entry, value, batch_size in self.recorder.take_early():
            if self._hooks is not None and results is not None and (entry.fx, entry.name) not in known:
                own = partial(type(results).log, results)
                options = {**entry.given_options, "batch_size": batch_size}
                self._hooks.log(results, own, entry.fx, entry.name, as_logged(value), options)

    def _tap(self, results: Any, own: Callable[..., None], fx: str, name: str, value: Any, options: dict[str, Any]) -> None:
        if self.recorder.active:
            self.recorder.record(fx, name, value, options)
        elif self._hooks is not None:
            self._hooks.log(results, own, fx, name, value, options)
        else:
            own(fx, name, value, **options)

    def _exchange(self, kind: str) -> LogExchange:
        if kind not in self._exchanges:
            self._exchanges[kind] = LogExchange(self._groups, self._device, self._last_stage_rank)
        return self._exchanges[kind]

    def _metric_values(self, records: Records) -> dict[Entry, Any]:
        """The metric objects that were logged; their values of this step are put into the records."""
        objects: dict[Entry, Any] = {}
        for entry, found in records.items():
            if entry.reduction == METRIC:
                objects[entry] = found.metric
                value = self.metrics.step_value(found.metric) if entry.option("on_step") else None
                records[entry] = Contribution() if value is None else Contribution([value.double().reshape(())], [1.0], [1.0])
        return objects

    def _store_metric(self, entry: Entry, metric: Any, combined: Combined, index: int) -> None:
        if metric is None:
            metric = self._module.get_submodule(entry.option("metric_attribute"))
        known = combined.weights[index].item() > 0
        metric._forward_cache = as_logged(combined.values[index]) if known else None
        self._store(entry, metric, 1)

    def _store(self, entry: Entry, value: Any, batch_size: float) -> None:
        trainer = self._module.trainer
        results = store.current_results(trainer)
        store.start_of_epoch_reset(trainer, entry.fx)
        key = store.storage_key(results, entry.fx, entry.name, bool(entry.option("add_dataloader_idx")))
        if entry.reduction != METRIC and self._stored.add(results, key, entry, value, batch_size):
            return
        type(results).log(results, entry.fx, entry.name, value, **entry.store_options, batch_size=batch_size)
        self._stored.remember(results, key, entry)
