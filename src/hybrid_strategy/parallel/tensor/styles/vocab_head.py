"""`vocab_head`: the output Linear, split by vocabulary; its logits are never gathered for the loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from hybrid_strategy.parallel.tensor.logits import VocabParallelLogits
from hybrid_strategy.parallel.tensor.region import Region
from hybrid_strategy.parallel.tensor.span import VocabSpan
from hybrid_strategy.parallel.tensor.styles._style import ParallelLayer, Style, become


class VocabHead(ParallelLayer, nn.Linear):
    """`[b, s, h]` or its shard -> `VocabParallelLogits` `[b, s, vocab]`; weight `[vocab/size, h]`, bias `[vocab/size]`."""

    span: VocabSpan

    def forward(self, x: Tensor) -> Tensor:
        local = F.linear(x if self.inside else self.region.enter(x), self.weight, self.bias)
        return VocabParallelLogits.wrap(local, self.span)


class VocabHeadStyle(Style):
    name = "vocab_head"
    layer = nn.Linear
    sliced: ClassVar[Mapping[str, int]] = {"weight": 0, "bias": 0}

    def install(self, module: nn.Module, region: Region, inside: bool) -> None:
        layer = become(module, VocabHead, region, inside)
        layer.span = VocabSpan(region.group, region.rank, region.widths(layer.out_features))
        layer.out_features = layer.span.width


PART = VocabHeadStyle()
