"""What a load brought back beside the tensors, and what it did not, added to the certificate that is printed."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.trainer.states import TrainerFn

from hybrid_strategy.checkpoint.certificate import Certificate
from hybrid_strategy.checkpoint.content import SmallState
from hybrid_strategy.checkpoint.encoding import plain, same
from hybrid_strategy.spec.layout import Layout
from hybrid_strategy.strategy.optimizer_states import inner_schedules
from hybrid_strategy.strategy.random_state import coordinate_key

Lines = Iterable[tuple[str, str]]


WANDB_ID = "wandb_id"
"""Key of `meta` for the W&B run that a checkpoint belongs to."""


_LIGHTNINGS = (
    *("epoch", "global_step", "pytorch-lightning_version", "loops", "callbacks", "lr_schedulers", "hybrid_strategy"),
    *("hparams_name", "hyper_parameters", "hparams_type", "averaging_state"),
    *("datamodule_hparams_name", "datamodule_hyper_parameters", "datamodule_hparams_type"),
)
"""Keys that have an account of their own, or are only read from the file."""


SCHEDULES = "schedules"
"""Key of `meta` for the classes of the learning-rate schedules."""


def schedule_classes(trainer: pl.Trainer) -> list[str]:
    """The classes of the learning-rate schedules, in order, each with those that it is made of."""
    return [_class_of(each.scheduler) for each in trainer.lr_scheduler_configs]


def _class_of(scheduler: Any) -> str:
    within = ", ".join(map(_class_of, inner_schedules(scheduler)))
    return f"{type(scheduler).__qualname__}({within})" if within else type(scheduler).__qualname__


def wandb_id(trainer: pl.Trainer) -> str | None:
    """The id of the W&B run of this process, where there is one."""
    found = (logger.version for logger in trainer.loggers if isinstance(logger, WandbLogger))
    return next((str(each) for each in found if each is not None), None)


def account_of(
    certificate: Certificate, small: SmallState, trainer: pl.Trainer, layout: Layout, gaps: Lines, settings: int
) -> Certificate:
    """The certificate of `fit` with every part of the state; that of validation, test and prediction speaks of weights only.

    Args:
        certificate: of the tensors.
        small: what was read beside them.
        layout: that of this run.
        gaps: (what, why) that the optimizers could not take back.
        settings: of how many parameters the optimizers took them back.
    """
    if trainer.state.fn != TrainerFn.FITTING:
        return certificate
    for what, why in gaps:
        certificate = certificate.with_not_restored(what, why)
    if settings:
        certificate = certificate.with_restored("optimizer settings", f"of {settings} parameters")
    for part in (_steps, _schedulers, _scaler, _callbacks, _data_module, _unread, _position, _wandb_run):
        certificate = part(certificate, small, trainer)
    return _random_state(certificate, small, layout)


def _steps(certificate: Certificate, small: SmallState, trainer: pl.Trainer) -> Certificate:
    return certificate.with_restored("steps", f"{small.state.get('global_step', 0)} optimizer steps")


def _schedulers(certificate: Certificate, small: SmallState, trainer: pl.Trainer) -> Certificate:
    states: Any = small.state.get("lr_schedulers", ())
    saved, here = len(states), len(trainer.lr_scheduler_configs)
    if saved != here:
        return certificate.with_not_restored("learning-rate schedules", f"the checkpoint has {saved}, this run has {here}")
    classes: Any = small.meta.get(SCHEDULES) or []
    for there, now, state in zip(classes, schedule_classes(trainer), states, strict=False):
        if there not in (now, now.partition("(")[0]):  # older checkpoints do not tell what it is made of
            taken = "its count of steps and its rates" if "last_epoch" in state else "its rates, which have no count of steps,"
            why = f"it was {there}; {now} takes over {taken} and goes on from there by its own rule"
            certificate = certificate.with_not_restored("learning-rate schedule", why)
    return certificate.with_restored("learning-rate schedules", str(saved)) if saved else certificate


def _scaler(certificate: Certificate, small: SmallState, trainer: pl.Trainer) -> Certificate:
    name = type(trainer.precision_plugin).__qualname__
    state = small.state.get(name)
    if isinstance(state, Mapping) and "scale" in state:
        return certificate.with_restored("loss scaler", f"scale {state['scale']:g}")
    if trainer.precision_plugin.state_dict():
        return certificate.with_not_restored("loss scaler", "the saved run had none; it begins anew")
    return certificate


def _callbacks(certificate: Certificate, small: SmallState, trainer: pl.Trainer) -> Certificate:
    saved: Sequence[str] = list(small.state.get("callbacks", {}))
    here = {each.state_key for each in trainer.callbacks}  # type: ignore[attr-defined]
    for key in (key for key in saved if key not in here):
        certificate = certificate.with_not_restored(f"callback {key}", "this run has none of this kind and these settings")
    for each in trainer.callbacks:  # type: ignore[attr-defined]
        if each.state_key not in saved and each.state_dict():
            certificate = certificate.with_not_restored(f"callback {each.state_key}", "the saved run had none; it begins anew")
    found = [key.partition("{")[0] for key in saved if key in here]
    return certificate.with_restored("callbacks", ", ".join(found)) if found else certificate


def overruled_callbacks(trainer: pl.Trainer, saved: Mapping[str, Any]) -> list[str]:
    """Arguments of this run's callbacks where the saved ones go on instead (`patience`).

    Lightning's checkpoint callbacks keep their own, and say where their folder has changed.
    """
    if trainer.state.fn != TrainerFn.FITTING:
        return []
    found = []
    for each in trainer.callbacks:  # type: ignore[attr-defined]
        state, arguments = saved.get(each.state_key, {}), inspect.signature(type(each).__init__).parameters
        if state and not isinstance(each, Checkpoint):
            here, _ = plain({key: value for key, value in each.state_dict().items() if key in arguments and key in state})
            changed = [key for key in here if not same(here[key], state[key])]
            found += [f"{key} of {type(each).__name__} {state[key]} for {here[key]}" for key in changed]
    return found


def _data_module(certificate: Certificate, small: SmallState, trainer: pl.Trainer) -> Certificate:
    name = _data_module_key(trainer)
    return certificate.with_restored("data module", name) if name is not None and name in small.state else certificate


def _data_module_key(trainer: pl.Trainer) -> str | None:
    """Under which Lightning saves the state of the data module; None where there is none."""
    module: Any = trainer.datamodule  # type: ignore[attr-defined]
    return None if module is None else type(module).__qualname__


def _unread(certificate: Certificate, small: SmallState, trainer: pl.Trainer) -> Certificate:
    """Parts that nobody here takes back: of a data module or loss scaler that this run has not, of a hook that is gone."""
    hooks = [trainer.lightning_module, *trainer.callbacks]  # type: ignore[attr-defined]
    bases = (pl.LightningModule, pl.Callback)
    if any(type(each).on_load_checkpoint not in [base.on_load_checkpoint for base in bases] for each in hooks):
        return certificate  # it may read any of them
    known = {*_LIGHTNINGS, type(trainer.precision_plugin).__qualname__, _data_module_key(trainer)}
    for key in sorted(small.state.keys() - known, key=str):
        if small.state[key]:
            certificate = certificate.with_not_restored(str(key), "nothing in this run takes it back")
    return certificate


def _position(certificate: Certificate, small: SmallState, trainer: pl.Trainer) -> Certificate:
    positions: Any = small.meta.get("positions")
    if not positions:
        why = "the training data of the saved run could not tell; it begins anew unless it takes its state back itself"
        return certificate.with_not_restored("data position", why)
    words = [f"epoch {each['epoch']}, {each['consumed_samples']} of its samples consumed" for each in positions]
    return certificate.with_restored("data position", "; ".join(words))


def _wandb_run(certificate: Certificate, small: SmallState, trainer: pl.Trainer) -> Certificate:
    saved, here = small.meta.get(WANDB_ID), wandb_id(trainer)
    if saved is None or trainer.global_rank != 0:  # the first rank alone has a run
        return certificate
    if saved == here:
        return certificate.with_restored("W&B run", str(saved))
    return certificate.with_not_restored(
        "W&B run", f"it was {saved}, this is {here}; give the logger id={saved!r} to go on with it"
    )


def _random_state(certificate: Certificate, small: SmallState, layout: Layout) -> Certificate:
    keys = {coordinate_key(layout.coordinate(rank)).rpartition("_")[0] for rank in range(layout.world_size)}
    known = {key.rpartition("_")[0] for key in small.random_state}
    if not known:
        return certificate.with_not_restored("random states", "the checkpoint has none")
    new = len(keys - known)
    extra = f"; {new} new coordinates draw from streams of their own" if new else ""
    return certificate.with_restored("random states", f"of {len(keys & known)} coordinates{extra}")
