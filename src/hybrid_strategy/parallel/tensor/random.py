"""Random numbers inside the tensor-parallel region: each rank drops out other heads and columns than its peers.

Outside the region the ranks of a tensor group draw the same numbers, so that replicas of an activation get one mask. Entering a
sub-block, one number is drawn from that common state, the state is put aside, and each rank seeds itself by (number, rank);
leaving, the common state comes back. So what is drawn inside follows from the common state alone, and recomputation, which
restores that state, repeats it.
"""

from __future__ import annotations

import torch
from torch import nn

from hybrid_strategy.distributed.random_state import torch_generators

DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def draws_random_numbers(module: nn.Module) -> bool:
    """Does a module below (or itself) drop out? Told by its class, or by a plain attribute such as `attention_dropout=0.1`."""
    return any(_drops_out(each) for each in module.modules())


def _drops_out(module: nn.Module) -> bool:
    if isinstance(module, DROPOUTS):
        return module.p > 0
    return any("drop" in key and isinstance(value, float) and value > 0 for key, value in vars(module).items())


class RegionRandom:
    """The random state of one rank: that of the region while it is inside, else the common one."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._common: list[tuple[torch.Generator, torch.Tensor]] = []

    def enter(self, device: torch.device) -> None:
        """Goes over to this rank's own numbers, on the CPU and on `device`."""
        seed = int(torch.randint(2**62, (), device="cpu"))
        self._common = [(each, each.get_state()) for each in torch_generators(device)]
        for generator, _ in self._common:
            generator.manual_seed(seed ^ self._rank)

    def leave(self) -> None:
        """Goes back to the common state; does nothing outside the region."""
        for generator, state in self._common:
            generator.set_state(state)
        self._common = []
