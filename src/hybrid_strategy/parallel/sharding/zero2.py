"""`zero2`: optimizer states and gradients are split over the data-parallel ranks (arXiv:1910.02054, section 5)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from hybrid_strategy.distributed.groups import Groups
from hybrid_strategy.parallel.parameters import Slot
from hybrid_strategy.parallel.sharding._base import Sharding
from hybrid_strategy.parallel.sharding._zero import RowSharding


class Part:
    """The registered part."""

    name = "zero2"

    @staticmethod
    def create(slots: Sequence[Slot], groups: Groups, device: torch.device, units: Sequence[nn.Module] = ()) -> Sharding:
        return RowSharding(slots, groups, device, free_early=True)


PART = Part()
