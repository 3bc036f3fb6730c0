"""`rowwise`: a Linear whose inputs are split. The ranks' outputs are partial sums and are summed on the way out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from hybrid_strategy.parallel.tensor.region import Region
from hybrid_strategy.parallel.tensor.styles._style import ParallelLayer, Style, become


class RowwiseLinear(ParallelLayer, nn.Linear):
    """`[b, s, in/size]` -> `[b, s, out]` or, along the sequence, `[b, s/size, out]`; weight `[out, in/size]`, bias `[out]`."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.region.leave(F.linear(x, self.weight))
        # after the sum: a bias added before it would count once per rank
        return y if self.bias is None else y + self.bias.to(y.dtype)


class Rowwise(Style):
    name = "rowwise"
    layer = nn.Linear
    sliced: ClassVar[Mapping[str, int]] = {"weight": 1}

    def partial_gradient(self, inside: bool, sequence_parallel: bool) -> bool:
        """The bias stands behind the sum, outside the region."""
        return sequence_parallel

    def install(self, module: nn.Module, region: Region, inside: bool) -> None:
        layer = become(module, RowwiseLinear, region, inside)
        layer.in_features = layer.weight.shape[1]


PART = Rowwise()
