"""What is known of a point before it runs, as plain values for tables: layout, batch, forecast."""

from __future__ import annotations

from typing import Any

from hybrid_strategy.config.forecasting import doubt_of, expected
from hybrid_strategy.config.plan import RunPlan
from hybrid_strategy.config.settings import RunConfig


def facts_of(config: RunConfig, planned: RunPlan) -> dict[str, Any]:
    """Plain values of a point for tables and for what the sweep says it holds fixed."""
    plan, world = planned.plan, planned.world
    length = config.model.get("sequence_length")
    rows = plan.batch.global_batch_size
    return {
        "layout": plan.layout.name,
        "data_parallel_size": plan.layout.data_parallel_size,
        "tensor_parallel_size": plan.layout.tensor_parallel_size,
        "pipeline_parallel_size": plan.layout.pipeline_parallel_size,
        "context_parallel_size": plan.layout.context_parallel_size,
        "sharding": plan.layout.sharding,
        "schedule": plan.layout.schedule if plan.layout.pipeline_parallel_size > 1 else None,
        "stages_per_rank": plan.layout.stages_per_rank,
        "activation_checkpoint": plan.layout.activation_checkpoint,
        "num_microbatches": plan.batch.num_microbatches,
        "global_batch_size": rows or None,
        "sequence_length": length,
        "tokens_per_step": rows * length if rows and isinstance(length, int) else None,
        "bubble_fraction": plan.bubble_fraction,
        "learning_rate": plan.learning_rate,
        "num_parameters": plan.num_parameters or None,
        "world_size": world.size,
        "num_nodes": world.num_nodes,
        "accelerator": world.accelerator,
        "seed": config.seed,
        "max_steps": config.trainer.max_steps,
        "precision": config.precision.mode,
        **forecast_facts(config, planned),
    }


def forecast_facts(config: RunConfig, planned: RunPlan) -> dict[str, Any]:
    """The forecast to be set beside what is measured; nothing where the sizes of the model or its batch are not known."""
    found = expected(config, planned)
    if found is None:
        return {}
    return {
        "forecast_step_seconds": found["step_seconds"],
        "forecast_tokens_per_second": found["tokens_per_second"],
        "forecast_memory_bytes": found["peak_memory_bytes"],
        "forecast_doubt": doubt_of(config, planned),
    }
