"""Where the data goes on after a restart: our position leads, Lightning's counters follow it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import lightning.pytorch as pl
from lightning_utilities.core.rank_zero import rank_zero_warn

from hybrid_strategy.data.position import MeshPosition
from hybrid_strategy.errors import message
from hybrid_strategy.strategy._lightning_loops import EPOCH, Standing, combination, count_batches, train_loaders

Position = dict[str, Any]
ORDER = "order"
"""Key of a position for the name of the order in which the epoch was begun."""

AT_END, ENDS, AGAIN, NOTHING = "at_end", "ends", "again", "nothing"
"""Key of a position for what the loader's end means: the epoch ends, or goes on and the loader begins again or gives nothing."""


def positions_of(trainer: pl.Trainer, standing: Standing) -> list[Position] | None:
    """The position of each training loader for a checkpoint; `None` where one of them cannot tell, or nothing was trained."""
    meshes = [getattr(loader, "mesh", None) for loader in train_loaders(trainer)]
    if not meshes or not all(isinstance(mesh, MeshPosition) for mesh in meshes):
        return None
    several = {"max_size_cycle": AGAIN, "max_size": NOTHING}.get(combination(trainer), ENDS)
    return [_position_of(mesh, standing, several if len(meshes) > 1 else ENDS) for mesh in meshes if mesh is not None]


def _position_of(mesh: MeshPosition, standing: Standing, at_end: str) -> Position:
    if standing.moment == EPOCH or standing.epoch_is_read:
        epoch = standing.epoch + standing.epoch_is_read
        return {"epoch": epoch, "consumed_samples": 0, "batches_done": 0, "block_size": mesh.block_size}
    done, whole = standing.batches_done - mesh.batches_apart, mesh.batches_of_a_pass
    if whole is not None and done >= whole:
        done = done % whole if at_end == AGAIN else whole
    position = {"epoch": mesh.epoch, "consumed_samples": mesh.consumed_after(done), "batches_done": done}
    name = mesh.order_name(position["consumed_samples"])
    return {**position, "block_size": mesh.block_size, ORDER: name, AT_END: at_end}


@dataclass(frozen=True)
class _Placed:
    """A loader that goes on.

    Attributes:
        same_blocks: its batches are those of the saved run.
        is_read: nothing of the epoch is left of it in this layout.
        at_end: what that means.
    """

    mesh: MeshPosition
    same_blocks: bool
    is_read: bool
    at_end: str

    @staticmethod
    def at(position: Position, mesh: MeshPosition) -> _Placed:
        """Puts `mesh` at `position`."""
        epoch, at_end = position["epoch"], position.get(AT_END, ENDS)
        mesh.load_state_dict(position)
        is_read = mesh.epoch != epoch
        if is_read and at_end == AGAIN:
            mesh.resume(epoch, 0)
        elif is_read and at_end == NOTHING:
            mesh.stay_at_end(epoch, position["consumed_samples"])
        return _Placed(mesh, position["block_size"] == mesh.block_size, is_read, at_end)


def _batches_done(placed: Sequence[_Placed]) -> int | None:
    """How many batches of the epoch count as done, so that the rest of the loader that ends it is read; `None`: it has none."""
    ends_with_first = placed[0].at_end == ENDS
    if ends_with_first and any(each.is_read for each in placed):
        return None
    try:
        lengths = [len(each.mesh) for each in placed]
    except TypeError:  # a stream without a length
        return max(each.mesh.first_batch for each in placed)
    of_epoch = min(lengths) if ends_with_first else max(lengths)
    at_hand = [each for each, length in zip(placed, lengths, strict=True) if length == of_epoch and not each.is_read]
    return min((each.mesh.first_batch for each in at_hand), default=None)


class Resumption:
    """Puts the loaders of training where the saved run stood, one after another as Lightning asks for them.

    Args:
        standing: where Lightning's loops stood.
        positions: of the loaders, in order; none where they could not tell.
    """

    def __init__(self, standing: Standing, positions: Sequence[Position]) -> None:
        self.standing = self._saved = standing
        self._positions, self._placed = list(positions), list[_Placed]()

    def place(self, trainer: pl.Trainer, mesh: MeshPosition) -> None:
        """The next loader goes on with the first sample that the saved run had not consumed, in this layout or another."""
        if not self._positions:
            return
        position = self._positions.pop(0)
        self._placed.append(_Placed.at(position, mesh))
        _tell_of_another_order(mesh, position)
        if self._saved.moment != EPOCH and not self._saved.epoch_is_read:
            self._count(trainer)

    def tell_of_other_loaders(self, trainer: pl.Trainer) -> None:
        """Warns where the loaders of this run are not those of which the checkpoint has positions, in the middle of an epoch."""
        placed, here = len(self._placed), len(train_loaders(trainer))
        saved = placed + len(self._positions)
        if saved and not placed == saved == here and self._saved.moment != EPOCH and not self._saved.epoch_is_read:
            rule = "what of them has no position in the checkpoint begins at its start, in the middle of an epoch"
            numbers = f"It has positions of {saved} training loaders, and {placed} of the {here} here took one"
            advice = "Give as many loaders as the saved run had, all of them torch's DataLoader"
            rank_zero_warn(message("train_dataloader", "not that of the saved run", rule, numbers, advice))

    def _count(self, trainer: pl.Trainer) -> None:
        """Lets Lightning count the batches as this layout has them."""
        done = _batches_done(self._placed)
        if done is None and self._positions:
            return  # another loader may have batches left
        if done is None:  # with `drop_last`, too few samples for a batch of this layout
            self.standing = replace(self._saved, epoch_is_read=True)
            for each in self._placed:
                each.mesh.resume(self._saved.epoch + 1, 0)
            return
        same = all(each.same_blocks for each in self._placed)
        self.standing = count_batches(trainer, self._saved, done, same)
        for each in self._placed:
            each.mesh.batches_apart = done - each.mesh.first_batch


def _tell_of_another_order(mesh: MeshPosition, position: Position) -> None:
    """Warns where the samples that the saved run consumed are not the first of this epoch's order."""
    consumed, before = position["consumed_samples"], position.get(ORDER)
    now = mesh.order_name(consumed) if consumed and mesh.epoch == position["epoch"] else ""
    if before and now and before != now:
        rule = "the epoch at hand was begun in another, so until it ends samples are read again and others are left out"
        advice = "Give the data, the sampler and the seed of the saved run, or go on from the end of an epoch"
        rank_zero_warn(message("order of the samples", now, rule, f"In the saved run it was {before!r}", advice))
