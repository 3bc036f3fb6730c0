"""Manual optimization: right where each rank holds the whole step, refused where a schedule must hold it."""

from __future__ import annotations

import lightning.pytorch as pl

from hybrid_strategy.errors import LayoutError, message
from hybrid_strategy.spec.layout import Layout
from hybrid_strategy.strategy.options import Options


def check_manual_optimization(module: pl.LightningModule, layout: Layout, options: Options) -> None:
    """Refuses `automatic_optimization=False` under settings that need to own the step.

    Raises:
        LayoutError: a pipeline, a sharding other than `ddp`, or micro-batches.
    """
    if module.automatic_optimization:
        return
    advice = "Set automatic_optimization=True, or pipeline_parallel_size=1, sharding='ddp' and one micro-batch"
    rule = "under manual optimization the module calls backward itself, so a schedule cannot play the step"
    if layout.pipeline_parallel_size > 1:
        raise LayoutError(message("pipeline_parallel_size", layout.pipeline_parallel_size, rule, "", advice))
    if layout.sharding != "ddp" and layout.data_parallel_size > 1:
        raise LayoutError(message("sharding", layout.sharding, rule, "", advice))
    for key in ("num_microbatches", "micro_batch_size"):
        value = getattr(options, key)
        if value is not None and not (key == "num_microbatches" and value == 1):
            raise LayoutError(message(key, value, rule, "", advice))
