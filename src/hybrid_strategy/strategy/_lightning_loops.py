"""The only file that touches the private counters of Lightning's loops (2.6): where training stands, and how it is put there.

Lightning resumes from its raw counters and guesses from their differences which hook was running; the guess is wrong for some
hooks (it skips a validation that was due, counts an epoch twice where `max_steps` is set, never calls the hooks of an epoch's
end). So a checkpoint holds what the counters mean, and a resumed run gets counters that Lightning cannot misread.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn

BATCH_END, VALIDATED, BETWEEN, EPOCH = "batch_end", "validated", "between", "epoch"
_LOOP = "epoch_loop"


@dataclass(frozen=True)
class Standing:
    """Where training stands.

    Attributes:
        epoch: the epoch at hand; where it has not begun, the one to begin.
        batches_done: finished batches of it. A window of accumulated batches that is not finished does not count.
        total_batches: finished batches of the run.
        moment: `batch_end`: after a batch, what is due after it (validation) has not been done. `validated`: after that
            validation. `between`: between two batches. `epoch`: before `epoch` begins.
        epoch_is_read: all batches of the epoch are done; its end is not.
        batches_that_stepped: Lightning's count for loggers, once what is due after the batch is done.
        plateau_is_due: the schedulers that watch a metric had not been told of the epoch's end.
        rewound: the batch or window at hand is done again, from its start.
    """

    epoch: int
    batches_done: int
    total_batches: int
    moment: str
    epoch_is_read: bool = False
    batches_that_stepped: int = 0
    plateau_is_due: bool = False
    rewound: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)

    @staticmethod
    def of(values: Mapping[str, Any]) -> Standing:
        """From plain data; what a later version adds is left out."""
        return Standing(**{name: values[name] for name in Standing.__dataclass_fields__ if name in values})


def standing_of(trainer: pl.Trainer) -> Standing:
    """Where `trainer` stands in `fit`; after it, where it stopped."""
    fit: Any = trainer.fit_loop
    loop = fit.epoch_loop
    batch, epoch = loop.batch_progress.current, fit.epoch_progress.current
    done, total = batch.processed, loop.batch_progress.total.processed
    inside_batch = batch.ready > batch.processed
    is_read = not inside_batch and not _is_at_hand(fit, batch.ready) and done > 0 and loop._num_ready_batches_reached()
    in_epoch = epoch.processed < epoch.started
    stopped_early = epoch.processed == epoch.started and done > 0 and not is_read
    stepped = loop._batches_that_stepped
    if (not in_epoch and not stopped_early) or done == 0:
        due = epoch.processed == epoch.completed + 1 and done > 0
        return Standing(epoch.processed, 0, total, EPOCH, False, stepped, due, inside_batch and batch.started == batch.ready)
    moment = _moment(trainer, fit)
    if moment in (BATCH_END, VALIDATED) and not loop._should_accumulate():
        stepped += 1
    at = epoch.processed if in_epoch else epoch.processed - 1
    window = done if is_read else done - done % trainer.accumulate_grad_batches
    rewound = window < done or (inside_batch and batch.started == batch.ready)
    if window < done:
        moment, total = BETWEEN, total - (done - window)
    return Standing(at, window, total, moment if window else EPOCH, is_read, stepped, False, rewound)


def _is_at_hand(fit: Any, begun: int) -> bool:
    """A batch has been fetched that does not count as begun: where it is the last one, Lightning has marked the epoch already."""
    fetcher = fit._data_fetcher
    read_ahead = len(getattr(fetcher, "batches", ()))
    return fetcher is not None and fetcher.fetched - read_ahead > begun


def _moment(trainer: pl.Trainer, fit: Any) -> str:
    batch, validation = fit.epoch_loop.batch_progress.current, fit.epoch_loop.val_loop
    if trainer.validating and trainer.state.fn == TrainerFn.FITTING:
        current, fetcher = validation.batch_progress.current, validation._data_fetcher
        # a batch that has been fetched is marked as the last before its step begins
        done = current.ready == current.completed == getattr(fetcher, "fetched", 0)
        return VALIDATED if done and validation.batch_progress.is_last_batch else BATCH_END
    return BATCH_END if batch.completed == batch.processed - 1 and batch.ready == batch.processed else BETWEEN


def is_at_window_start(trainer: pl.Trainer) -> bool:
    """Is the batch at hand the first of those whose gradients are added up for one optimizer step?"""
    started: int = trainer.fit_loop.epoch_loop.batch_progress.current.ready - 1
    return started % trainer.accumulate_grad_batches == 0


def train_loaders(trainer: pl.Trainer) -> list[Any]:
    """The loaders of training as they were processed; empty before that."""
    combined = trainer.fit_loop._combined_loader
    return [] if combined is None else list(combined.flattened)


def combination(trainer: pl.Trainer) -> str:
    """How the loaders of training go together, in Lightning's words; empty before they were processed."""
    combined = trainer.fit_loop._combined_loader
    return "" if combined is None else str(combined._mode)


def counters_for(standing: Standing, fit_loop: Mapping[str, Any]) -> dict[str, Any]:
    """The state of Lightning's fit loop, rewritten so that it says `standing` and nothing else.

    Args:
        fit_loop: what Lightning saved.
    """
    begun = standing.moment != EPOCH
    epochs = _counts(standing.epoch, standing.epoch + begun)
    total, current = _counts(standing.total_batches), _counts(standing.batches_done if begun else 0)
    state = {key: value for key, value in fit_loop.items() if ".val_loop." not in key}
    state["state_dict"] = {key: value for key, value in state.get("state_dict", {}).items() if key != "combined_loader"}
    state["epoch_progress"] = {"total": epochs, "current": dict(epochs)}
    state[f"{_LOOP}.batch_progress"] = {"total": total, "current": current, "is_last_batch": standing.epoch_is_read}
    state[f"{_LOOP}.state_dict"] = {
        **state.get(f"{_LOOP}.state_dict", {}),
        "_batches_that_stepped": standing.batches_that_stepped,
    }
    progress = f"{_LOOP}.automatic_optimization.optim_progress"
    if progress in state:
        state[progress] = _finished(state[progress])
    return state


def _counts(done: int, begun: int | None = None) -> dict[str, int]:
    begun = done if begun is None else begun
    return {"ready": begun, "started": begun, "processed": done, "completed": done}


def _finished(progress: Any) -> Any:
    """What was begun and not completed has not been begun."""
    if not isinstance(progress, Mapping):
        return progress
    if "completed" in progress:
        return dict.fromkeys(progress, progress["completed"])
    return {key: _finished(value) for key, value in progress.items()}


def count_batches(trainer: pl.Trainer, standing: Standing, done: int, same_batches: bool) -> Standing:
    """Another batch size or data-parallel size has other batches behind it: `done` of this epoch."""
    total = standing.total_batches
    if not same_batches and standing.batches_done:
        total = round(total * done / standing.batches_done)
    progress: Any = trainer.fit_loop.epoch_loop.batch_progress
    progress.current.load_state_dict(_counts(done))
    progress.total.load_state_dict(_counts(total))
    return replace(standing, batches_done=done, total_batches=total)


def settle(trainer: pl.Trainer, standing: Standing) -> None:
    """Makes the loops go on from `standing`. To be called when training starts, after Lightning has read its counters."""
    fit: Any = trainer.fit_loop
    loop = fit.epoch_loop
    for each in (fit, loop, loop.val_loop):
        each._restarting = False
        each.reset_restart_stage()
    if standing.moment == EPOCH:
        _finish_epoch(fit, standing)
        return
    fit._restart_stage = "restarted_mid_epoch"
    loop._restarting = True
    if standing.epoch_is_read:
        _stand_at_end(trainer, fit)
    check = loop._should_check_val_fx(fit._data_fetcher)
    validates = standing.moment == BATCH_END and check
    if validates or standing.epoch_is_read:
        loop._restart_stage = "restarted_on_last"
    if validates:
        loop.val_loop._restart_stage = "restarted_mid_evaluation"
    passes_end_of_batch = validates or (standing.epoch_is_read and check)
    if not passes_end_of_batch and standing.moment != BETWEEN:
        loop.update_lr_schedulers("step", update_plateau_schedulers=True)
    # Lightning counts this batch once more: at its end, or where the loop is reset
    counts_again = passes_end_of_batch or not standing.epoch_is_read
    loop._batches_that_stepped = standing.batches_that_stepped - int(counts_again and not loop._should_accumulate())


def _finish_epoch(fit: Any, standing: Standing) -> None:
    fit.epoch_loop._batches_that_stepped = standing.batches_that_stepped
    if standing.plateau_is_due and standing.epoch > 0:
        current = fit.epoch_progress.current
        current.completed -= 1  # the scheduler's frequency is counted in the epoch that ended
        fit.epoch_loop.update_lr_schedulers("epoch", update_plateau_schedulers=True)
        current.completed += 1


def _stand_at_end(trainer: pl.Trainer, fit: Any) -> None:
    """No batch of this epoch is left to read, however many it has here."""
    batches = trainer.num_training_batches
    if batches != float("inf"):
        fit.epoch_loop.batch_progress.current.load_state_dict(_counts(int(batches)))
    fit.epoch_loop.batch_progress.is_last_batch = True
    fit._data_fetcher.done = True
    if hasattr(fit._data_fetcher, "batches"):
        fit._data_fetcher.batches = []


def logged_values(trainer: pl.Trainer) -> dict[str, float]:
    """The values that callbacks and schedulers watch, as far as they have been published."""
    return {name: float(value) for name, value in trainer._logger_connector._callback_metrics.items()}


def put_logged_values(trainer: pl.Trainer, values: Mapping[str, float]) -> None:
    """Callbacks and schedulers find them until they are logged anew."""
    device = trainer.strategy.root_device
    put = {name: torch.tensor(value, device=device) for name, value in values.items()}
    trainer._logger_connector._callback_metrics.update(put)
