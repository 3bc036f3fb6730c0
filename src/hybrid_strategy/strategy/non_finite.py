"""Where a number that is not finite came from: module, micro-batch, rank, samples.

Only what comes first is told: a module that makes it from finite inputs, or a batch that holds it. What is computed from it on
later stages, and after a sum over ranks everywhere, is a consequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn

from hybrid_strategy.parallel.stages import AbsentUnit
from hybrid_strategy.parallel.trees import tensors_of
from hybrid_strategy.strategy.hybrid import HybridParallelStrategy
from hybrid_strategy.strategy.step_call import PlayedAgain

_SHOWN = 5
BATCH, STEP = "the batch", "training_step"


@dataclass
class Origin:
    """The first place of one rank in one micro-batch; `rows` are those of the micro-batch that are not finite there."""

    module: str
    micro_batch: int
    rows: list[int]
    cause: str


@dataclass
class Finding:
    """What one rank found.

    Attributes:
        rank: its name and coordinate.
        origins: by micro-batch.
        samples: dataset indices of the rows of each micro-batch, where they are known.
        gradients: names of parameters whose gradient is not finite on this rank.
    """

    rank: str
    origins: list[Origin] = field(default_factory=list)
    samples: list[list[Any] | None] = field(default_factory=list)
    gradients: list[str] = field(default_factory=list)

    def lines(self) -> Iterator[str]:
        """In words, one a line."""
        for each in self.origins:
            known = self.samples[each.micro_batch] if each.micro_batch < len(self.samples) else None
            rows = [known[row] if known is not None and row < len(known) else row for row in each.rows]
            kind = "samples" if known is not None else "rows"
            where = f"{self.rank}, micro-batch {each.micro_batch}, {kind} {_listed(rows)}"
            yield f"{where}: {each.module} {each.cause}"
        if not self.origins and self.gradients:
            yield f"{self.rank}: forward is finite; gradients that are not: {_listed(self.gradients)}"


def locate(trainer: pl.Trainer) -> list[Finding]:
    """What all ranks find about the last training step; a collective call that plays its forward passes once more."""
    strategy = trainer.strategy
    assert isinstance(strategy, HybridParallelStrategy)  # the caller's
    engine, made, groups = strategy.engine, strategy.made, strategy.groups
    mine = Finding(engine.whereabouts.rank)
    held = [(slot.name, made.sharding.optimizer_parameter(slot).grad) for slot in made.slots]
    mine.gradients = [name for name, gradient in held if gradient is not None and not bool(gradient.isfinite().all())]
    with _watched(trainer.lightning_module, engine.micro_batch, mine.origins):
        played = engine.forward_again()
    place = groups.coordinate
    reads = not (place.pipeline_parallel or place.tensor_parallel or place.context_parallel)  # its peers have the same batch
    mine.origins = [*(_in_the_batch(played) if reads else ())] or mine.origins or [*_in_the_step(played)]
    mine.samples = [_samples(trainer, each) for each in played.rows]
    found: list[Any] = [None] * trainer.world_size
    dist.all_gather_object(found, mine)
    return _first_of_all(found)


def _first_of_all(found: Sequence[Finding]) -> list[Finding]:
    """Only the earliest: a batch before modules, modules before the step's own code, forward before gradients."""
    for kind in (lambda name: name == BATCH, lambda name: name not in (BATCH, STEP), lambda name: name == STEP):
        chosen = [replace(each, origins=[origin for origin in each.origins if kind(origin.module)]) for each in found]
        if any(each.origins for each in chosen):
            return [each for each in chosen if each.origins]
    return [each for each in found if each.gradients]


def _samples(trainer: pl.Trainer, rows: Sequence[int]) -> list[Any] | None:
    mesh = getattr(trainer.train_dataloader, "mesh", None)
    batch = trainer.fit_loop.epoch_loop.batch_progress.current.ready - 1
    known = mesh.samples_of(batch) if mesh is not None else None
    return None if known is None else [known[row] for row in rows if row < len(known)]


@contextmanager
def _watched(module: nn.Module, now: Callable[[], int], origins: list[Origin]) -> Iterator[None]:
    """Notes the first module of each micro-batch that makes what is not finite from what is."""

    def note(name: str) -> Callable[..., None]:
        def look(layer: nn.Module, inputs: Any, options: Any, output: Any) -> None:
            rows = _bad_rows(output)
            if rows is None or _bad_rows((inputs, options)) is not None or any(each.micro_batch == now() for each in origins):
                return
            weights = [key for key, each in layer.named_parameters() if not bool(each.isfinite().all())]
            cause = f"makes it: its {weights[0]} is not finite" if weights else "makes it from finite inputs"
            origins.append(Origin(name, now(), rows, cause))

        return look

    leaves = [(name, each) for name, each in module.named_modules() if name and not list(each.children())]
    leaves = [(name, each) for name, each in leaves if not isinstance(each, AbsentUnit)]  # they return stand-ins of NaN
    handles = [each.register_forward_hook(note(name), with_kwargs=True) for name, each in leaves]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _in_the_batch(played: PlayedAgain) -> Iterator[Origin]:
    for index, part in enumerate(played.micro_batches):
        rows = _bad_rows(part)
        if rows is not None:
            yield Origin(BATCH, index, rows, "holds it")


def _in_the_step(played: PlayedAgain) -> Iterator[Origin]:
    for index, output in played.outputs.items():
        if _bad_rows(output) is not None:
            yield Origin(STEP, index, list(range(len(played.rows[index]))), "makes it from finite outputs of its modules")


def _bad_rows(value: Any) -> list[int] | None:
    """Rows (entries of the first dimension) of the first tensor that is not finite; `None`: all are."""
    for _, tensor in tensors_of(value):
        if isinstance(tensor, Tensor) and tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            flat = tensor.reshape(tensor.shape[0], -1) if tensor.dim() else tensor.reshape(1, 1)
            return torch.nonzero(~flat.isfinite().all(1)).flatten().tolist()
    return None


def _listed(values: Sequence[Any]) -> str:
    shown = ", ".join(str(each) for each in values[:_SHOWN])
    return f"{shown} and {len(values) - _SHOWN} more" if len(values) > _SHOWN else shown
