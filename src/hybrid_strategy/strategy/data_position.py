"""Where the data goes on after a restart: our position leads, Lightning's counters follow it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
from lightning_utilities.core.rank_zero import rank_zero_warn

from hybrid_strategy.data.position import MeshPosition
from hybrid_strategy.errors import message
from hybrid_strategy.strategy._lightning_loops import EPOCH, Standing, count_batches, train_loaders

Position = dict[str, Any]
ORDER = "order"
"""Key of a position for the name of the order in which the epoch was begun."""


def positions_of(trainer: pl.Trainer, standing: Standing) -> list[Position] | None:
    """The position of each training loader for a checkpoint; `None` where one of them cannot tell, or nothing was trained."""
    meshes = [getattr(loader, "mesh", None) for loader in train_loaders(trainer)]
    if not meshes or not all(isinstance(mesh, MeshPosition) for mesh in meshes):
        return None
    return [_position_of(mesh, standing) for mesh in meshes if mesh is not None]


def _position_of(mesh: MeshPosition, standing: Standing) -> Position:
    if standing.moment == EPOCH or standing.epoch_is_read:
        epoch = standing.epoch + standing.epoch_is_read
        return {"epoch": epoch, "consumed_samples": 0, "batches_done": 0, "block_size": mesh.block_size}
    position = mesh.state_dict(_within(mesh, standing.batches_done))
    return {**position, ORDER: mesh.order_name(position["consumed_samples"])}


def _within(mesh: MeshPosition, batches_done: int) -> int:
    """A loader that is shorter than its neighbours is read again from its start."""
    try:
        return (batches_done - 1) % len(mesh) + 1
    except TypeError:  # a stream without a length
        return batches_done


class Resumption:
    """Puts the loaders of training where the saved run stood, one after another as Lightning asks for them.

    Args:
        standing: where Lightning's loops stood.
        positions: of the loaders, in order; none where they could not tell.
    """

    def __init__(self, standing: Standing, positions: Sequence[Position]) -> None:
        self.standing = standing
        self._positions, self._done = list(positions), 0

    def place(self, trainer: pl.Trainer, mesh: MeshPosition) -> None:
        """The next loader goes on with the first sample that the saved run had not consumed, in this layout or another."""
        if not self._positions:
            return
        position = self._positions.pop(0)
        mesh.load_state_dict(position)
        _tell_of_another_order(mesh, position)
        if self.standing.moment != EPOCH and not self.standing.epoch_is_read:
            same = position["block_size"] == mesh.block_size
            self._done = max(self._done, mesh.first_batch)
            self.standing = count_batches(trainer, self.standing, self._done, same)


def _tell_of_another_order(mesh: MeshPosition, position: Position) -> None:
    """Warns where the samples that the saved run consumed are not the first of this epoch's order."""
    consumed, before = position["consumed_samples"], position.get(ORDER)
    now = mesh.order_name(consumed) if consumed and mesh.epoch == position["epoch"] else ""
    if before and now and before != now:
        rule = "the epoch at hand was begun in another, so until it ends samples are read again and others are left out"
        advice = "Give the data, the sampler and the seed of the saved run, or go on from the end of an epoch"
        rank_zero_warn(message("order of the samples", now, rule, f"In the saved run it was {before!r}", advice))
