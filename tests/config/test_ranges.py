"""Values that have the right type and cannot be meant are refused by their full key, before anything is planned or started."""

from __future__ import annotations

import pytest

from hybrid_strategy.config.compose import Source, run_config
from hybrid_strategy.config.ranges import ENTRIES, RANGES
from hybrid_strategy.config.settings import GROUPS
from hybrid_strategy.config.targets import SHIPPED
from hybrid_strategy.errors import ConfigError

REFUSED = (
    "optimizer.learning_rate=inf",
    "strategy.timeout=inf",
    "trainer.gradient_clip_val=inf",
    "paths.output_dir=",
    "paths.cache_dir=",
    "resume=",
    "seed=99999999999999999999",
    "seed=-1",
    "strategy.seed=-1",
    "strategy.timeout=-5",
    "strategy.timeout=0",
    "strategy.checkpoint_error=ignore",
    "strategy.checkpoint_when_busy=never",
    "strategy.process_group_backend=mpi2",
    "strategy.parallel_plan=3",
    "strategy.tensor_parallel_size=99999999999999999999",
    "strategy.num_microbatches=0",
    "model.num_layers=1000000007",
    "model.num_attention_heads=1000000007",
    "model.vocab_size=-1",
    "optimizer.betas=[0.9]",
    "optimizer.betas=[0.9,1.5]",
    "optimizer.eps=-1",
    "optimizer.learning_rate=-1",
    "learning_rate.min_ratio=2",
    "learning_rate.warmup_steps=-1",
    "trainer.max_epochs=-3",
    "trainer.max_steps=-2",
    "trainer.max_time=abc",
    "trainer.limit_val_batches=-1",
    "trainer.limit_val_batches=1.5",
    "trainer.val_check_interval=0",
    "trainer.gradient_clip_val=-1",
    "trainer.gradient_clip_algorithm=max",
    "trainer.log_every_n_steps=-1",
    "callbacks.checkpoint.mode=mn",
    "callbacks.checkpoint.save_top_k=-5",
    "callbacks.throughput.window_steps=0",
    "logger.wandb.mode=foo",
    "logger.wandb.finish_timeout=0",
)
ALLOWED = (
    "seed=0",
    "strategy.sharding=ZERO2",
    "strategy.activation_checkpoint=Full",
    "strategy.process_group_backend=cpu:gloo",
    "trainer.limit_val_batches=0",
    "trainer.limit_val_batches=0.5",
    "trainer.val_check_interval=1.0",
    "trainer.max_time=00:12:00:00",
    "trainer.max_epochs=-1",
    "callbacks.checkpoint.save_top_k=-1",
    "trainer.gradient_clip_val=0",
    "logger.wandb.mode=offline",
)


@pytest.mark.parametrize("override", REFUSED)
def test_what_cannot_be_meant_is_refused_by_its_full_key(override: str) -> None:
    key = override.partition("=")[0]
    with pytest.raises(ConfigError) as caught:
        run_config(Source(("logger=csv_wandb", override)))
    assert str(caught.value).startswith(f"{key} is ")
    assert "Set " in str(caught.value)


def test_what_can_be_meant_is_not() -> None:
    for override in ALLOWED:
        run_config(Source(("logger=csv_wandb", override)))


def test_ranges_are_those_of_keys_that_exist() -> None:
    config = run_config(Source(()))
    for key in RANGES:
        group, _, name = key.partition(".")
        values = getattr(config, group)
        assert not name or (group in GROUPS and (name in values if group == "data" else hasattr(values, name))), key
    kinds = {kind._target_.rpartition(".")[2]: kind for kind in SHIPPED}  # type: ignore[attr-defined]
    for kind, keys in ENTRIES.items():
        assert set(keys) <= set(kinds[kind].__dataclass_fields__), kind
