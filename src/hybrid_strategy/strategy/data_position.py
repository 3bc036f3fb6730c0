"""Where the data goes on after a restart: our position leads, Lightning's counters follow it."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl

from hybrid_strategy.data.position import MeshPosition

_TRAINER_EPOCH = "trainer_epoch"


def present_position(trainer: pl.Trainer) -> dict[str, int] | None:
    """The position of the training data for a checkpoint, or `None` where the loader has none or nothing is trained."""
    mesh = getattr(trainer.train_dataloader, "mesh", None)
    if mesh is None or not trainer.training:
        return None
    position: dict[str, int] = mesh.state_dict(trainer.fit_loop.epoch_loop.batch_progress.current.ready)
    return {**position, _TRAINER_EPOCH: trainer.fit_loop.epoch_progress.current.ready - 1}


def without_loader_state(state: dict[str, Any]) -> dict[str, Any]:
    """Lightning's state without what it asked the loaders for: that is rank 0's count of batches, for rank 0's layout."""
    loops = dict(state.get("loops", {}))
    fit = dict(loops.get("fit_loop", {}))
    own = {key: value for key, value in fit.get("state_dict", {}).items() if key != "combined_loader"}
    if not fit:
        return state
    return {**state, "loops": {**loops, "fit_loop": {**fit, "state_dict": own}}}


def go_on(trainer: pl.Trainer, mesh: MeshPosition, position: dict[str, Any]) -> None:
    """The loader goes on with the first sample that the saved run had not consumed, in this layout or another.

    Lightning counts epochs anew when training stops in the middle of one (`max_steps`): it calls the rest of the epoch the next
    epoch. The order of samples keeps its own count; the difference is kept as an offset.
    """
    mesh.load_state_dict(position)
    own = int(position["epoch"])
    finished = mesh.epoch != own
    theirs = int(position[_TRAINER_EPOCH]) if finished else _counter(trainer.fit_loop.epoch_progress).processed
    mesh.epoch_offset = own - theirs
    if not finished:
        _count_batches(trainer, mesh.first_batch)


def _counter(progress: Any) -> Any:
    """The counter of what is going on now; Lightning declares the base class of what it is."""
    return progress.current


def _count_batches(trainer: pl.Trainer, done: int) -> None:
    """Another batch size has other batches behind it; Lightning must expect the number that is left."""
    current = _counter(trainer.fit_loop.epoch_loop.batch_progress)
    unfinished = current.processed - current.completed  # 1 where the checkpoint was written at the end of a batch
    current.ready = current.started = current.processed = done
    current.completed = done - unfinished
