"""Lightning's calls of the user's steps, made into plays of the engine."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor

from hybrid_strategy.errors import DataError, message
from hybrid_strategy.strategy import _lightning
from hybrid_strategy.strategy.hand_over import loss_with_hand_over
from hybrid_strategy.strategy.loaders import brought
from hybrid_strategy.strategy.manual import ManualStep
from hybrid_strategy.strategy.precision import loss_scale
from hybrid_strategy.strategy.step import StepEngine
from hybrid_strategy.strategy.step_call import StepCall

_LOADERS = {
    "train": "train_dataloader",
    "validate": "val_dataloaders",
    "test": "test_dataloaders",
    "predict": "predict_dataloaders",
}
_STEPS = {"train": "training_step", "validate": "validation_step", "test": "test_step", "predict": "predict_step"}
_CONTEXTS = {"train": "train_step_context", "validate": "val_step_context", "test": "test_step_context"}


def refuse_own_fetching(module: pl.LightningModule) -> None:
    """Refuses steps that fetch their batches themselves.

    Raises:
        DataError: a step has the argument `dataloader_iter`.
    """
    for name in _STEPS.values():
        if "dataloader_iter" in inspect.signature(getattr(module, name)).parameters:
            rule = "a step runs once for every stage and micro-batch, so it cannot fetch its batches itself"
            raise DataError(message(f"{name}(...)", "dataloader_iter", rule, "", f"Write {name}(batch, batch_idx)"))


class Steps:
    """Answers `training_step`, `validation_step`, `test_step` and `predict_step` of one module.

    Args:
        module: the user's module.
        engine: plays it.
        plugin: makes the precision context of a pass.
    """

    def __init__(self, module: pl.LightningModule, engine: StepEngine, plugin: Precision) -> None:
        self._module, self._engine, self._plugin = module, engine, plugin

    def train(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Plays forward and backward; Lightning's own backward on the loss returned hands the gradients over."""
        scale = loss_scale(self._plugin) / self._module.trainer.accumulate_grad_batches
        call = self.call("train", args, kwargs)
        if _lightning.ready_to_step(self._module.trainer):
            self._engine.reduce_early()
        with self.doing(call):
            self._look_closely(call)
            loss, output = self._engine.train(call, scale)
        carried = loss_with_hand_over(loss, lambda gradient: self._receive(gradient, scale))
        return {**output, "loss": carried} if isinstance(output, Mapping) else carried

    def train_by_hand(self, manual: ManualStep, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Runs the step of a module that calls backward itself."""
        call = self.call("train", args, kwargs)
        with self.doing(call):
            self._look_closely(call)
            return manual.run(call, self._module)

    def evaluate(self, kind: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Plays forward passes; `kind` is `validate`, `test` or `predict`."""
        call = self.call(kind, args, kwargs)
        with self.doing(call):
            return self._engine.evaluate(call)

    def doing(self, call: StepCall) -> AbstractContextManager[None]:
        """Tells where this rank is while it plays `call`."""
        trainer = self._module.trainer
        batch = self._batch_index(call.kind, call.arguments)
        place = f"batch {batch}, epoch {trainer.current_epoch}, global step {trainer.global_step}"
        return self._engine.whereabouts.doing(f"{_STEPS[call.kind]} ({place})")

    def call(self, kind: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> StepCall:
        """One call, with what the loader knows of its batch."""
        batch, *rest = (*args, *kwargs.values())
        call = StepCall(
            kind,
            getattr(self._module, _STEPS[kind]),
            getattr(self._plugin, _CONTEXTS.get(kind, "predict_step_context")),
            batch,
            tuple(rest),
        )
        loader, nested = self._loader(kind, batch, rest)
        mesh = getattr(loader, "mesh", None)
        if mesh is None:
            return call
        index = self._batch_index(kind, rest)
        call.sample_dims = {} if nested else loader.sample_dims
        call.real_rows, call.run_rows = mesh.rows_of(index), mesh.global_rows_of(index)
        if loader.mesh_source.batch_size is None and loader.mesh_source.batch_sampler is None and call.real_rows:
            call.real_rows = call.run_rows = None  # an item of the loader is a whole batch: it does not count samples
        return call

    def _look_closely(self, call: StepCall) -> None:
        self._engine.cadence.begin(of_epoch=self._batch_index(call.kind, call.arguments) == 0)
        self._engine.replicas.check()

    def _loader(self, kind: str, batch: Any, rest: Sequence[Any]) -> tuple[Any, bool]:
        """The loader that the batch is of; of several that are read together the first that has brought something, and `True`."""
        loaders = getattr(self._module.trainer, _LOADERS[kind])
        each = list(brought(loaders, batch))
        if kind != "train" and (len(rest) > 1 or len(each) == 1):  # one after another
            return each[rest[1] if len(rest) > 1 else 0][0], False
        first = next((loader for loader, part in each if part is not None), None)
        return first, isinstance(loaders, (Mapping, list, tuple))

    def _batch_index(self, kind: str, rest: Sequence[Any]) -> int:
        """The number of the batch, also where the user's step does not ask for it."""
        if rest and isinstance(rest[0], int):
            return rest[0]
        trainer = self._module.trainer
        evaluating = trainer.fit_loop.epoch_loop.val_loop if trainer.state.fn == "fit" else trainer.validate_loop
        loops = {"train": trainer.fit_loop.epoch_loop, "test": trainer.test_loop, "predict": trainer.predict_loop}
        loop: Any = loops.get(kind, evaluating)
        return int(loop.batch_progress.current.ready) - 1

    def _receive(self, gradient: Tensor, scale: float) -> None:
        """Called by autograd where Lightning runs backward."""
        self._engine.hand_over(gradient.item() / scale)
        if _lightning.ready_to_step(self._module.trainer):
            with self._engine.whereabouts.doing(f"the reduction of gradients (global step {self._module.trainer.global_step})"):
                self._engine.reduce()
