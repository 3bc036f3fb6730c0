"""`colwise`: a Linear whose outputs are split. Its input is whole; its output stays split."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from hybrid_strategy.parallel.tensor.region import Region
from hybrid_strategy.parallel.tensor.styles._style import ParallelLayer, Style, become


class ColwiseLinear(ParallelLayer, nn.Linear):
    """`[b, s, in]` -> `[b, s, out/size]`; weight `[out/size, in]`, bias `[out/size]`."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x if self.inside else self.region.enter(x), self.weight, self.bias)


class Colwise(Style):
    name = "colwise"
    layer = nn.Linear
    sliced: ClassVar[Mapping[str, int]] = {"weight": 0, "bias": 0}

    def install(self, module: nn.Module, region: Region, inside: bool) -> None:
        layer = become(module, ColwiseLinear, region, inside)
        layer.out_features = layer.weight.shape[0]


PART = Colwise()
