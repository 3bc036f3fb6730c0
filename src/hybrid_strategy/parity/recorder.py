"""Writes down what one process sees: its pieces of all gradients and weights, the losses, the norm. One file a step and kind."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from hybrid_strategy.distributed.gradient_norm import total_norm
from hybrid_strategy.parity.dropout import switch_off_dropout
from hybrid_strategy.parity.files import CLIPPED, GRADIENTS, INITIAL, RECORD_FILE, WEIGHTS, tensor_file
from hybrid_strategy.parity.samples import digests
from hybrid_strategy.spec.shard import ShardSpec
from hybrid_strategy.strategy.hybrid import HybridParallelStrategy
from hybrid_strategy.strategy.options import Options
from hybrid_strategy.strategy.outputs import sums_over_rows
from hybrid_strategy.strategy.target import find_plan, find_target


@dataclass(frozen=True)
class Held:
    """A piece that this process holds: where it lies in the whole, and what the optimizer updates."""

    spec: ShardSpec
    parameter: nn.Parameter


_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class Recorder(pl.Callback, ABC):
    """Records optimizer steps into `folder`, then stops the Trainer.

    Args:
        folder: this process's own.
        steps: optimizer steps to record.
    """

    def __init__(self, folder: Path, steps: int) -> None:
        self._folder, self._wanted = folder, steps
        self._steps: list[dict[str, Any]] = []
        self._losses: list[float] = []
        self._microbatches = 1
        self._notes: dict[str, Any] = {}
        self._samples: list[str] = []
        self._before_batch, self._rows = torch.empty(0), 0
        folder.mkdir(parents=True, exist_ok=True)

    @abstractmethod
    def held(self, trainer: pl.Trainer, module: pl.LightningModule) -> list[Held]:
        """The pieces of this process."""

    @abstractmethod
    def norm(self, trainer: pl.Trainer, module: pl.LightningModule) -> float:
        """The norm of all gradients of the whole model, as clipping would take it."""

    @abstractmethod
    def batch_dims(self, trainer: pl.Trainer, module: pl.LightningModule) -> Mapping[str, int | None]:
        """Where the batch dimension is not 0."""

    def num_microbatches(self, trainer: pl.Trainer, num_rows: int) -> int:
        """Micro-batches that a batch of so many rows is cut into."""
        return 1

    # --------------------------------------------------------------------------------------------------------- hooks

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self._notes["dropout_modules"] = switch_off_dropout(module)
        self._notes["batch_norms"] = sum(isinstance(each, _BATCH_NORMS) and each.training for each in module.modules())
        self._save(INITIAL, None, self.held(trainer, module), gradients=False)

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        rows = digests(batch, self.batch_dims(trainer, module))
        self._samples += rows
        self._microbatches = max(self._microbatches, self.num_microbatches(trainer, len(rows)))
        self._before_batch, self._rows = torch.get_rng_state(), len(rows)

    def on_before_backward(self, trainer: pl.Trainer, module: pl.LightningModule, loss: Tensor) -> None:
        divided = () if loss.grad_fn is None else loss.grad_fn.next_functions  # by Lightning, to accumulate
        self._notes["loss_is_a_sum"] = any(sums_over_rows(node, self._rows) for node, _ in divided)

    def on_before_optimizer_step(self, trainer: pl.Trainer, module: pl.LightningModule, optimizer: Any) -> None:
        if len(self._steps) < self._wanted:
            self._save(GRADIENTS, len(self._steps), self.held(trainer, module), gradients=True)
            self._steps.append(
                {"norm": self.norm(trainer, module), "losses": [], "samples": [], "clipped": False, "weights": False}
            )

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not torch.equal(self._before_batch, torch.get_rng_state()):
            self._notes["draws_random_numbers"] = True
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, Tensor):
            self._losses.append(float(loss))
        if self._steps and not self._steps[-1]["weights"]:
            self._finish_step(trainer, module)
        if len(self._steps) >= self._wanted:
            trainer.should_stop = True

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        record = {
            "pieces": [asdict(each.spec) for each in self.held(trainer, module)],
            "steps": self._steps,
            "num_microbatches": self._microbatches,
            **self._notes,
        }
        (self._folder / RECORD_FILE).write_text(json.dumps(record), encoding="utf-8")

    # ------------------------------------------------------------------------------------------------------- details

    def _finish_step(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Gradients are those the optimizer used until the next batch sets them to zero."""
        index, held = len(self._steps) - 1, self.held(trainer, module)
        if _changes_gradients(trainer, module):
            self._save(CLIPPED, index, held, gradients=True)
            self._steps[-1]["clipped"] = True
        self._save(WEIGHTS, index, held, gradients=False)
        self._steps[-1].update(losses=self._losses, samples=self._samples, weights=True)
        self._losses, self._samples = [], []

    def _save(self, kind: str, step: int | None, held: Iterable[Held], gradients: bool) -> None:
        values = {each.spec.name: each.parameter.grad if gradients else each.parameter for each in held}
        kept = {name: value.detach().cpu().clone().contiguous() for name, value in values.items() if value is not None}
        save_file(kept, tensor_file(self._folder, kind, step))


class ReferenceRecorder(Recorder):
    """Of one process that holds everything; `options` are those of the layout it is compared with."""

    def __init__(self, folder: Path, steps: int, options: Options) -> None:
        super().__init__(folder, steps)
        self._options = options

    def held(self, trainer: pl.Trainer, module: pl.LightningModule) -> list[Held]:
        return [Held(ShardSpec.whole(name, tuple(each.shape)), each) for name, each in module.named_parameters()]

    def norm(self, trainer: pl.Trainer, module: pl.LightningModule) -> float:
        return float(nn.utils.get_total_norm([each.grad.double() for each in module.parameters() if each.grad is not None]))

    def batch_dims(self, trainer: pl.Trainer, module: pl.LightningModule) -> Mapping[str, int | None]:
        return find_plan(module, find_target(module, self._options.module), self._options.parallel_plan).batch_dims


class LayoutRecorder(Recorder):
    """Of one rank of a layout."""

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        _strategy(trainer).engine.replicas.compares = False  # the gate does, all values, and says what their difference means
        super().on_train_start(trainer, module)

    def held(self, trainer: pl.Trainer, module: pl.LightningModule) -> list[Held]:
        made = _strategy(trainer).made
        return [Held(slot.shard_spec, made.sharding.optimizer_parameter(slot)) for slot in made.slots]

    def norm(self, trainer: pl.Trainer, module: pl.LightningModule) -> float:
        strategy = _strategy(trainer)
        return float(total_norm(strategy.owned_gradients(), 2.0, strategy.root_device))

    def batch_dims(self, trainer: pl.Trainer, module: pl.LightningModule) -> Mapping[str, int | None]:
        options = _strategy(trainer).options
        return find_plan(module, find_target(module, options.module), options.parallel_plan).batch_dims

    def num_microbatches(self, trainer: pl.Trainer, num_rows: int) -> int:
        strategy = _strategy(trainer)
        return min(strategy.options.microbatches_of(num_rows, strategy.layout.pipeline_parallel_size), num_rows)


def _strategy(trainer: pl.Trainer) -> HybridParallelStrategy:
    strategy = trainer.strategy
    assert isinstance(strategy, HybridParallelStrategy)  # the worker made it
    return strategy


def _changes_gradients(trainer: pl.Trainer, module: pl.LightningModule) -> bool:
    """May the optimizer see other gradients than `on_before_optimizer_step` does?"""
    hooks = ("configure_gradient_clipping", "on_before_optimizer_step")
    own = any(getattr(type(module), hook) is not getattr(pl.LightningModule, hook) for hook in hooks)
    return own or trainer.gradient_clip_val is not None
