"""`vocab_embedding`: an Embedding whose rows are split by vocabulary; each rank looks up its own rows, the sum is the result."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from hybrid_strategy.errors import ModelError, message
from hybrid_strategy.parallel.tensor.region import Region
from hybrid_strategy.parallel.tensor.styles._style import ParallelLayer, Style, become


class VocabEmbedding(ParallelLayer, nn.Embedding):
    """Ids `[b, s]` -> `[b, s, h]`, or `[b, s/size, h]` under sequence parallelism; weight `[vocab/size, h]`."""

    start: int
    vocab_size: int

    def forward(self, ids: Tensor) -> Tensor:
        stop = self.start + self.weight.shape[0]
        # ids that no rank has stay wrong everywhere, so that torch refuses them as it does without the split
        elsewhere = ((ids >= 0) & (ids < self.start)) | ((ids >= stop) & (ids < self.vocab_size))
        rows = F.embedding((ids - self.start).masked_fill(elsewhere, 0), self.weight, self._local_padding())
        return self.region.leave(rows.masked_fill(elsewhere.unsqueeze(-1), 0))

    def _local_padding(self) -> int | None:
        if self.padding_idx is None or not self.start <= self.padding_idx < self.start + self.weight.shape[0]:
            return None
        return self.padding_idx - self.start


class VocabEmbeddingStyle(Style):
    name = "vocab_embedding"
    layer = nn.Embedding
    sliced: ClassVar[Mapping[str, int]] = {"weight": 0}

    def check(self, module: nn.Module, name: str) -> None:
        super().check(module, name)
        for option in ("max_norm", "scale_grad_by_freq", "sparse"):
            if value := getattr(module, option):
                rule = "an embedding split by vocabulary cannot honour it"
                raise ModelError(message(f"{name}.{option}", value, rule, "", "Unset it or set tensor_parallel_size to 1"))

    def install(self, module: nn.Module, region: Region, inside: bool) -> None:
        layer = become(module, VocabEmbedding, region, inside)
        layer.vocab_size = layer.num_embeddings
        layer.start, layer.num_embeddings = region.chunk(layer.vocab_size)


PART = VocabEmbeddingStyle()
