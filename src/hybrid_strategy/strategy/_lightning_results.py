"""The only file that touches Lightning's private collection of logged values (2.6) and the connector that publishes it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Checkpoint, EarlyStopping
from torch import Tensor
from torchmetrics import Metric

Tap = Callable[..., None]
"""`tap(results, log, fx, name, value, options)`; `log(fx, name, value, **options)` is Lightning's own."""


def tap_results(trainer: pl.Trainer, tap: Tap) -> None:
    """Sends every value that Lightning would store through `tap`."""
    loops = (trainer.fit_loop.epoch_loop, trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop)
    for loop in loops:
        results = loop._results
        results.log = _tapped(results, tap)


def _tapped(results: Any, tap: Tap) -> Callable[..., None]:
    def own(*args: Any, **options: Any) -> None:
        type(results).log(results, *args, **options)

    def log(fx: str, name: str, value: Any, **options: Any) -> None:
        tap(results, own, fx, name, value, options)

    return log


@dataclass(frozen=True)
class PublishTimes:
    """What to do when Lightning makes logged values visible; each runs on every rank at the same time.

    Attributes:
        batch_end: after the last hook of a batch.
        last_batch: after the last batch of a loader or an epoch, before the hooks of its end.
        before_monitors: before checkpoint and early-stopping callbacks look at the values of a training batch or epoch.
        epoch_end: after the last hook of an epoch.
    """

    batch_end: Callable[[], None]
    last_batch: Callable[[], None]
    before_monitors: Callable[[], None]
    epoch_end: Callable[[], None]


def watch_publishing(trainer: pl.Trainer, times: PublishTimes) -> None:
    """Calls `times` where Lightning publishes."""
    connector = trainer._logger_connector
    kind = type(connector)

    def on_batch_end() -> None:
        times.batch_end()
        kind.on_batch_end(connector)

    def epoch_end_reached() -> None:
        kind.epoch_end_reached(connector)
        times.last_batch()

    def on_epoch_end() -> None:
        times.epoch_end()
        kind.on_epoch_end(connector)

    connector.on_batch_end = on_batch_end  # type: ignore[method-assign]
    connector.epoch_end_reached = epoch_end_reached  # type: ignore[method-assign]
    connector.on_epoch_end = on_epoch_end  # type: ignore[method-assign]
    monitors = [each for each in trainer.callbacks if isinstance(each, (EarlyStopping, Checkpoint))]  # type: ignore[attr-defined]
    if monitors:
        _call_before(monitors[0], "on_train_epoch_end", times.before_monitors)
    by_step = [each for each in monitors if getattr(each, "monitor", None) and getattr(each, "_every_n_train_steps", 0)]
    if by_step:
        _call_before(by_step[0], "on_train_batch_end", times.before_monitors)


def _call_before(callback: Any, hook: str, action: Callable[[], None]) -> None:
    def with_action(*arguments: Any) -> None:
        action()
        getattr(type(callback), hook)(callback, *arguments)

    setattr(callback, hook, with_action)


def current_results(trainer: pl.Trainer) -> Any:
    """The collection of the loop that runs now; `None` while predicting."""
    return trainer._results


def start_of_epoch_reset(trainer: pl.Trainer, fx: str) -> None:
    """What Lightning does before it stores the first value of a hook in a new epoch."""
    connector = trainer._logger_connector
    results = trainer._results
    if results is not None and connector.should_reset_tensors(fx):
        results.reset(metrics=False, fx=fx)
    connector._current_fx = fx


def compute_metrics(results: Any) -> None:
    """Computes metric objects in the order of their names on all ranks; a progress bar on one rank then finds them ready."""
    for _, each in sorted(results.valid_items(), key=lambda item: item[0]):
        if not each.is_tensor and each.meta.on_epoch and each._computed is None:
            each.compute()


class KnownValues:
    """Values that were stored before with the same options: Lightning's checks of them need not be made again each step."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[Any, Any]] = {}

    def remember(self, results: Any, key: str, options: Any) -> None:
        """`key` has been stored with these options."""
        self._known[key] = (weakref.ref(results[key]), options)

    def add(self, results: Any, key: str, options: Any, value: Tensor, batch_size: float) -> bool:
        """Adds `value` to what is stored, if it was stored with the same options before."""
        reference, before = self._known.get(key, (None, None))
        entry = results.get(key)
        if reference is None or entry is None or reference() is not entry or before != options:
            return False
        results.update_metrics(key, value.to(entry.value.device), batch_size)
        return True


@dataclass(frozen=True)
class Stored:
    """The state of one stored value before this rank's own contribution; `state` is `None` where there was none."""

    key: str
    state: tuple[Any, ...] | None


def storage_key(results: Any, fx: str, name: str, add_dataloader_idx: bool) -> str:
    index = f".{results.dataloader_idx}" if add_dataloader_idx and results.dataloader_idx is not None else ""
    return f"{fx}.{name}{index}"


def remember(results: Any, key: str) -> Stored:
    """The present state of a stored value."""
    entry = results.get(key)
    if entry is None or not entry.is_tensor:
        return Stored(key, None)
    return Stored(key, (entry.value, getattr(entry, "cumulated_batch_size", None), entry.has_reset))


def replace_contribution(results: Any, stored: Stored, value: Tensor, batch_size: float) -> None:
    """Puts `value` in the place of what was logged since `remember`."""
    entry = results[stored.key]
    if stored.state is None or stored.state[2]:
        Metric.reset(entry)
    else:
        entry.value = stored.state[0]
        if stored.state[1] is not None:
            entry.cumulated_batch_size = stored.state[1]
    results.update_metrics(stored.key, value.to(entry.value.device), batch_size)
