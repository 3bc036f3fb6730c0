"""How many samples a step consumes and how they are cut."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class BatchSpec:
    """`global_batch_size` samples an optimizer step = data_parallel_size x micro_batch_size x num_microbatches x accumulate."""

    global_batch_size: int
    num_microbatches: int = 1
    accumulate_grad_batches: int = 1

    def rank_batch_size(self, data_parallel_size: int) -> int:
        """Samples that one data-parallel rank's loader yields at once."""
        return self.global_batch_size // (data_parallel_size * self.accumulate_grad_batches)

    def micro_batch_size(self, data_parallel_size: int) -> int:
        """Samples of the largest micro-batch."""
        return -(-self.rank_batch_size(data_parallel_size) // self.num_microbatches)
