"""What is typed and would do nothing is refused by name; what a file says may stand idle, and a sweep keeps its baseline."""

from __future__ import annotations

from dataclasses import replace

import pytest
import yaml

from hybrid_strategy.config.compose import Source, run_config
from hybrid_strategy.config.door import known_keys
from hybrid_strategy.config.idle import RULES, check_counted, check_counted_somewhere, idle_defaults
from hybrid_strategy.config.plan import RunPlan, plan_of
from hybrid_strategy.config.settings import RunConfig
from hybrid_strategy.errors import ConfigError

PLAIN = run_config(Source(("model=llama_tiny",)))


def _planned(*overrides: str) -> tuple[RunConfig, RunPlan]:
    """What composing them would give, for keys of typed groups and of callbacks: Hydra takes longer than all that is tested."""
    config = PLAIN
    for text in overrides:
        key, _, value = text.partition("=")
        group, *entry, name = key.split(".")
        values, change = getattr(config, group), {name: yaml.safe_load(value)}
        changed = {**values, entry[0]: {**values[entry[0]], **change}} if entry else replace(values, **change)
        config = replace(config, **{group: changed})
    return config, plan_of(config)


@pytest.mark.parametrize(
    ("overrides", "start"),
    [
        ("strategy.schedule=GPipe", "is 'GPipe': there is no pipeline, so it would be ignored. strategy.pipeline_parallel_size"),
        ("strategy.reduce_dtype=bfloat16", "is 'bfloat16': gradients are summed over one rank"),
        ("learning_rate.min_ratio=0.0 learning_rate.schedule=constant", "is 0.0: a constant rate does not fall"),
        ("learning_rate.total_steps=9 learning_rate.schedule=constant", "is 9: a constant rate does not fall"),
        ("learning_rate.exponent=0.7", "is 0.7: it is that of power scaling, so it would be ignored. learning_rate.scaling is"),
        ("learning_rate.base_batch_size=9 learning_rate.scaling=none", "is 9: the rate is not scaled"),
        ("trainer.val_check_interval=5 trainer.limit_val_batches=0", "is 5: nothing is validated"),
        ("trainer.limit_train_batches=5 trainer.overfit_batches=2", "is 5: the batches that are overfitted"),
        ("trainer.limit_test_batches=5", "is 5: nothing is tested"),
        (
            "cluster.gpus_per_node=4",
            "is 4: it is the number of processes on this machine, so it would be ignored",
        ),
        ("callbacks.checkpoint.mode=max", "is 'max': the newest checkpoints are kept"),
        ("callbacks.checkpoint.every_n_epochs=2 trainer.enable_checkpointing=false", "is 2: no checkpoint is written"),
        ("strategy.asynchronous_checkpoint=true trainer.enable_checkpointing=false", "is True: no checkpoint is written"),
    ],
)
def test_a_typed_setting_that_does_nothing_is_refused_by_its_key(overrides: str, start: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_counted(*_planned(*overrides.split()), overrides.split())
    assert str(caught.value).startswith(f"{overrides.partition('=')[0]} {start}")
    check_counted(*_planned(*overrides.split()), ())  # a file, a preset


@pytest.mark.parametrize(
    "overrides",
    [
        "strategy.schedule=1F1B learning_rate.min_ratio=0.1 learning_rate.schedule=constant",
        "strategy.pipeline_parallel_size=2 strategy.schedule=GPipe",
        "strategy.pipeline_parallel_size=auto strategy.schedule=GPipe",
        "strategy.data_parallel_size=2 strategy.reduce_dtype=bfloat16",
        "learning_rate.scaling=power learning_rate.exponent=0.7 learning_rate.base_batch_size=9",
        "callbacks.checkpoint.mode=max callbacks.checkpoint.monitor=x",
        "cluster.name=h100_sxm cluster.gpus_per_node=4",
        "cluster.gpus_per_node=2 cluster.devices=2",
    ],
)
def test_settings_that_count_pass(overrides: str) -> None:
    check_counted(*_planned(*overrides.split()), overrides.split())


def test_mappings_are_read_and_case_does_not_matter() -> None:
    planned = _planned("learning_rate.schedule=constant", "learning_rate.min_ratio=0.5", "strategy.schedule=1f1b")
    check_counted(*planned, ["strategy.schedule=1f1b"])
    with pytest.raises(ConfigError, match=r"^learning_rate\.min_ratio is 0\.5"):
        check_counted(*planned, ["learning_rate={schedule:constant,min_ratio:0.5}"])


def test_a_sweep_is_refused_only_what_none_of_its_points_needs() -> None:
    sizes = ("strategy.pipeline_parallel_size=1", "strategy.pipeline_parallel_size=2")
    points = [_planned(each, "strategy.schedule=GPipe") for each in sizes]
    typed = ("strategy.schedule=1F1B,GPipe", "strategy.pipeline_parallel_size=1,2")
    check_counted_somewhere(points, typed)
    assert [idle_defaults(*each, typed) for each in points] == [("strategy.schedule=1F1B",), ()]
    with pytest.raises(ConfigError, match=r"^strategy\.schedule is 'GPipe'"):
        check_counted_somewhere([points[0], _planned()], typed)


def test_rules_are_of_keys_that_exist() -> None:
    assert [key for rule in RULES for key in rule.keys if known_keys(RunConfig, key)] == []
