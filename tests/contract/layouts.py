"""The layouts of the contract: what one process sees, each of them must see."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

GLOBAL_BATCH = 8
"""Samples of a step in every layout: the loader's batch is this divided by the data-parallel size."""


@dataclass(frozen=True)
class ContractLayout:
    """`strategy` holds the arguments of `HybridParallelStrategy`; `None` is plain Lightning."""

    name: str
    world_size: int = 1
    data_parallel_size: int = 1
    strategy: Mapping[str, Any] | None = field(default_factory=dict)

    @property
    def batch_size(self) -> int:
        return GLOBAL_BATCH // self.data_parallel_size

    @property
    def pipelined(self) -> bool:
        return (self.strategy or {}).get("pipeline_parallel_size", 1) > 1

    @property
    def tensor_parallel(self) -> bool:
        return (self.strategy or {}).get("tensor_parallel_size", 1) > 1

    @property
    def context_parallel(self) -> bool:
        return (self.strategy or {}).get("context_parallel_size", 1) > 1

    @property
    def sharded(self) -> bool:
        return "sharding" in (self.strategy or {})


_PIPELINE = {"pipeline_parallel_size": 2, "num_microbatches": 4}

PLAIN = ContractLayout("plain", strategy=None)

LAYOUTS = {
    layout.name: layout
    for layout in (
        ContractLayout("single", strategy={"num_microbatches": 2}),
        ContractLayout("dp2", 2, 2),
        ContractLayout("dp2_zero1", 2, 2, {"sharding": "zero1", "num_microbatches": 2}),
        ContractLayout("dp2_zero3", 2, 2, {"sharding": "zero3", "num_microbatches": 2}),
        ContractLayout("tp2", 2, 1, {"tensor_parallel_size": 2}),
        ContractLayout("cp2", 2, 1, {"context_parallel_size": 2, "num_microbatches": 2}),
        ContractLayout("pp2_1f1b", 2, 1, {**_PIPELINE, "schedule": "1F1B"}),
        ContractLayout("pp2_interleaved", 2, 1, {**_PIPELINE, "schedule": "Interleaved1F1B"}),
        ContractLayout("pp2_zbv", 2, 1, {**_PIPELINE, "schedule": "ZBVZeroBubble"}),
        ContractLayout("dp2_pp2", 4, 2, {**_PIPELINE, "num_microbatches": 2}),
        ContractLayout("tp2_pp2", 4, 1, {**_PIPELINE, "tensor_parallel_size": 2}),
    )
}
