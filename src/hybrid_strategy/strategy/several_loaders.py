"""What one process does and several data-parallel ranks cannot, where a step has batches of several loaders."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_warn

from hybrid_strategy.data.position import MeshPosition
from hybrid_strategy.errors import message


def warn_of_uneven_shares(loaders: Sequence[Any]) -> None:
    """Warns where a batch of one of several training loaders is not shared out evenly.

    A step has one loss, and the ranks' losses are weighed by the rows of one loader: the share of the other is another one.
    """
    meshes = [loader.mesh for loader in loaders if isinstance(getattr(loader, "mesh", None), MeshPosition)]
    uneven = next((mesh for mesh in meshes if not mesh.shares_evenly), None)
    if len(loaders) > 1 and uneven is not None:
        rule = "the last batch of one of them is not shared out evenly, so that its part of that step's loss is weighed otherwise"
        numbers = f"It has no multiple of data_parallel_size={uneven.data_parallel_size} rows"
        advice = "Set drop_last=True for the loader, or give it a number of samples that data_parallel_size divides"
        rank_zero_warn(message("train_dataloader", f"{len(loaders)} loaders", rule, numbers, advice))
