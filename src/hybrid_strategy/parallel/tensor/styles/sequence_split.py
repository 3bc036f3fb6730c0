"""`sequence_split`: a module whose output is whole and joins the residual stream, such as a table of learned positions.

Under sequence parallelism each rank takes its part of the output along the sequence, and the gradients of the module's parameters
are partial sums; without it nothing happens.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn

from hybrid_strategy.parallel.tensor.region import Region
from hybrid_strategy.parallel.tensor.styles._style import Style


def _split(region: Region, module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return region.own_part(output)


class SequenceSplit(Style):
    name = "sequence_split"

    def install(self, module: nn.Module, region: Region, inside: bool) -> None:
        if region.sequence_parallel and not inside:
            module.register_forward_hook(partial(_split, region))


PART = SequenceSplit()
